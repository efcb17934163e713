"""bfloat16 keys and values in the layout that the CPU kernels read: engine/kernels/cpu/kv.h has it in full.

Holds the numbers of ``kv_cache.format=bf16`` in another order; knows no attention.
Shape suffixes as in engine/kv/format.py, and N blocks, B tokens a block.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.attention import TOKENS_PER_GROUP, KVLayout, KVPool, declare, kv_write
from engine.kv.format import Filling
from engine.kv.placement import Places
from engine.kv.shape import BlockShape


class PackedLayer:
    """One plain pool, bf16 [N, K, 2, B x D]: of each block and head the keys, then the values.

    Attributes:
        pointers: the same for the kernels.
    """

    def __init__(self, library: ctypes.CDLL, *, num_blocks: int, layout: KVLayout) -> None:
        declare(library)
        self._library = library
        self.layout = layout
        self.pool = huge_pages((num_blocks, layout.num_kv_heads, 2, layout.block_size * layout.head_dim), dtype=torch.bfloat16)
        self.pointers = KVPool.plain(self.pool)

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return (self.pool,)

    def write(self, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, filling: Filling | None = None) -> None:
        assert filling is None, "a plain block is full when its last slot is written"
        k_TKD, v_TKD = (rows.to(torch.bfloat16).contiguous() for rows in (k_TKD, v_TKD))
        kv_write(self._library, self.layout, self.pointers, k_TKD, v_TKD, slots_T.contiguous())

    def gather(self, slots_GL: Tensor) -> tuple[Tensor, Tensor]:
        return gather(self.pool, slots_GL, layout=self.layout)

    def copy_block(self, source: int, target: int) -> None:
        self.pool[target] = self.pool[source]


def gather(pool: Tensor, slots_GL: Tensor, *, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of a plain pool's slots, bf16 [G, K, L, D] each."""
    num_blocks, num_kv_heads = pool.shape[:2]
    group = (layout.block_size // TOKENS_PER_GROUP, layout.head_dim // 2, TOKENS_PER_GROUP, 2)
    keys = pool[:, :, 0].view(num_blocks, num_kv_heads, *group)
    values = pool[:, :, 1].view(num_blocks, num_kv_heads, layout.block_size // 2, layout.head_dim, 2)
    blocks, offsets = slots_GL // layout.block_size, slots_GL % layout.block_size
    k_GLKD = keys[blocks, :, offsets // TOKENS_PER_GROUP, :, offsets % TOKENS_PER_GROUP].flatten(-2)
    v_GLKD = values[blocks, :, offsets // 2, :, offsets % 2]
    return k_GLKD.transpose(1, 2).contiguous(), v_GLKD.transpose(1, 2).contiguous()


def huge_pages(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in pages of 2 MiB where the system has them: blocks lie scattered, and with small
    pages each would cost a walk through the page table. A page is taken when it is first written, so memory follows need.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Block sizes and head sizes are multiples of 16; the device is the CPU that ``library`` was built for."""

    library: ctypes.CDLL
    is_plain: bool = True

    def bytes_per_block(self, shape: BlockShape) -> int:
        return shape.num_numbers * int(torch.bfloat16.itemsize)

    def allocate(
        self, shape: BlockShape, *, num_layers: int, num_blocks: int, device: torch.device, dtype: torch.dtype, places: Places | None
    ) -> SequenceOf[PackedLayer]:
        assert device.type == "cpu"
        layout = KVLayout(shape.num_kv_heads, shape.head_dim, shape.block_size)
        return [PackedLayer(self.library, num_blocks=num_blocks, layout=layout) for _ in range(num_layers)]

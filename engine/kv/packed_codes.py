"""Quantised blocks in the layout that the CPU kernels read: engine/kernels/cpu/kv_codes.h has it in full.

Holds the numbers of ``kv_cache.format=int8`` and ``fp8`` in another order; knows no attention.
Shape suffixes as in engine/kv/packed.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.attention import CODES, KVLayout, KVPool, declare, kv_decode, kv_fill, kv_write
from engine.kv.format import Filling, load_format
from engine.kv.packed import gather, huge_pages
from engine.kv.placement import Places
from engine.kv.shape import BlockShape


class PackedCodesLayer:
    """One layer's codes and exponents, its own open places and everybody's filling ones.

    Attributes:
        pointers: the same for the kernels.
    """

    def __init__(self, library: ctypes.CDLL, *, layout: KVLayout, num_blocks: int, num_open: int, filling: Tensor) -> None:
        declare(library)
        self._library = library
        self.layout = layout
        num_kv_heads, half = layout.num_kv_heads, layout.block_size * layout.head_dim
        num_exponents = layout.head_dim + layout.block_size if layout.codes == CODES["int8"] else 2
        self.codes = huge_pages((num_blocks, num_kv_heads, 2, half), dtype=torch.uint8)
        self.exponents = huge_pages((num_blocks, num_kv_heads, num_exponents), dtype=torch.int8)
        self.open = huge_pages((num_open, num_kv_heads, 2, half), dtype=torch.bfloat16)
        self.filling = filling
        self.pointers = KVPool.coded(self.codes, self.exponents, filling=filling, open=self.open)

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return self.codes, self.exponents

    def write(self, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, filling: Filling | None = None) -> None:
        assert filling is not None, "the runner says which blocks get full"
        k_TKD, v_TKD = (rows.to(torch.bfloat16).contiguous() for rows in (k_TKD, v_TKD))
        kv_fill(self._library, self.layout, self.pointers, moves_2M=filling.moves_2M)
        kv_write(self._library, self.layout, self.pointers, k_TKD, v_TKD, slots_T.contiguous())
        kv_fill(self._library, self.layout, self.pointers, full_2F=filling.full_2F)

    def gather(self, slots_GL: Tensor) -> tuple[Tensor, Tensor]:
        blocks, places = (slots_GL // self.layout.block_size).unique(return_inverse=True)
        full = kv_decode(self._library, self.layout, self.pointers, blocks[blocks < len(self.codes)])
        plain = torch.cat((full, self.filling, self.open))
        rows = torch.cat((torch.arange(len(full)), blocks[len(full) :] - len(self.codes) + len(full)))[places]
        return gather(plain, rows * self.layout.block_size + slots_GL % self.layout.block_size, layout=self.layout)

    def copy_block(self, source: int, target: int) -> None:
        first_open = len(self.codes) + len(self.filling)
        assert min(source, target) >= first_open, "full blocks are shared, never copied"
        self.open[target - first_open] = self.open[source - first_open]


@dataclass(frozen=True, slots=True)
class PackedCodesFormat:
    """``name`` is that of the format whose numbers it holds; block sizes, head sizes and device as for ``PackedFormat``."""

    library: ctypes.CDLL
    name: str
    is_plain: bool = False

    def bytes_per_block(self, shape: BlockShape) -> int:
        return load_format(self.name).bytes_per_block(shape)

    def allocate(
        self, shape: BlockShape, *, num_layers: int, num_blocks: int, device: torch.device, dtype: torch.dtype, places: Places | None
    ) -> SequenceOf[PackedCodesLayer]:
        assert device.type == "cpu" and dtype == torch.bfloat16 and places is not None
        layout = KVLayout(shape.num_kv_heads, shape.head_dim, shape.block_size, CODES[self.name])
        filling = huge_pages((places.num_filling, shape.num_kv_heads, 2, shape.block_size * shape.head_dim), dtype=torch.bfloat16)
        return [
            PackedCodesLayer(self.library, layout=layout, num_blocks=num_blocks, num_open=places.num_open, filling=filling)
            for _ in range(num_layers)
        ]

"""A format that keeps keys and values as numbers of one dtype; the named files beside this one choose the dtype.

Knows no scale and no rounding but the dtype's own.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv.format import Filling
from engine.kv.placement import Places
from engine.kv.shape import BlockShape


class PlainLayer:
    """Pools [num_blocks, K, block_size, D] for keys and for values: a head's share of a block lies in one piece."""

    def __init__(self, shape: BlockShape, *, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        # Not zeroed: a page of memory is taken when its block is first written, so memory follows need.
        self.keys = torch.empty(sizes, dtype=dtype, device=device)
        self.values = torch.empty(sizes, dtype=dtype, device=device)
        self._heads_K = torch.arange(shape.num_kv_heads, device=device)

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    def write(self, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, filling: Filling | None = None) -> None:
        assert filling is None, "a plain block is full when its last slot is written"
        rows = self._rows(slots_T[:, None], heads=self._heads_K)
        self.keys.view(-1, self.keys.shape[-1]).index_copy_(0, rows, k_TKD.to(self.keys.dtype).flatten(0, 1))
        self.values.view(-1, self.values.shape[-1]).index_copy_(0, rows, v_TKD.to(self.values.dtype).flatten(0, 1))

    def gather(self, slots_GL: Tensor) -> tuple[Tensor, Tensor]:
        num_kv_heads, head_dim = self.keys.shape[1], self.keys.shape[3]
        shape = (slots_GL.shape[0], num_kv_heads, slots_GL.shape[1], head_dim)
        rows = self._rows(slots_GL[:, None, :], heads=self._heads_K[:, None])
        k = self.keys.view(-1, head_dim).index_select(0, rows).view(shape)
        v = self.values.view(-1, head_dim).index_select(0, rows).view(shape)
        return k, v

    def copy_block(self, source: int, target: int) -> None:
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]

    def _rows(self, slots: Tensor, *, heads: Tensor) -> Tensor:
        """Flat index of each (slot, head) among the pool's num_blocks x K x block_size rows of D numbers."""
        num_kv_heads, block_size = self.keys.shape[1], self.keys.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        return ((blocks * num_kv_heads + heads) * block_size + offsets).flatten()


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Two numbers of ``dtype`` (a key's and a value's) for each head, token and dimension."""

    dtype: torch.dtype
    is_plain: bool = True

    def bytes_per_block(self, shape: BlockShape) -> int:
        return shape.num_numbers * self.dtype.itemsize

    def allocate(
        self, shape: BlockShape, *, num_layers: int, num_blocks: int, device: torch.device, dtype: torch.dtype, places: Places | None
    ) -> SequenceOf[PlainLayer]:
        return [PlainLayer(shape, num_blocks=num_blocks, dtype=self.dtype, device=device) for _ in range(num_layers)]

"""A format that keeps full blocks in few bits: codes and their scales for the keys, others for the values.

Knows when numbers are quantised and where the bytes lie; what they mean is a ``Codec``'s business.
Shape suffixes as in engine/kv/format.py, and N blocks, B tokens a block, R rows, C columns of a part.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kv.format import Filling
from engine.kv.formats._plain import PlainLayer
from engine.kv.placement import Places
from engine.kv.shape import BlockShape


class Part(NamedTuple):
    """Bytes of one head's share of a block: ``num_columns`` of them for each token, or once for all its tokens."""

    num_columns: int
    per_token: bool

    def num_rows(self, shape: BlockShape) -> int:
        return shape.block_size if self.per_token else 1


class Codec(Protocol):
    """How one head's numbers of a block, or of many blocks, become bytes and numbers again."""

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        """What it stores."""
        ...

    def encode(self, x_NKBD: Tensor) -> tuple[Tensor, ...]:
        """float32 -> the bytes of each part, uint8 [N, K, B or 1, C]."""
        ...

    def decode(self, parts_RC: tuple[Tensor, ...]) -> Tensor:
        """Each part's bytes for R tokens -> float32 [R, D]; a token's numbers depend on its own bytes alone."""
        ...


class _Pool:
    """All blocks' bytes of the keys, or of the values."""

    def __init__(self, codec: Codec, *, shape: BlockShape, num_blocks: int, device: torch.device) -> None:
        self._codec = codec
        self._block_size = shape.block_size
        self._heads_K1 = torch.arange(shape.num_kv_heads, device=device)[:, None]
        # Not zeroed: a page of memory is taken when its block is first written, so memory follows need.
        self.parts = [
            torch.empty(num_blocks, shape.num_kv_heads, part.num_rows(shape), part.num_columns, dtype=torch.uint8, device=device)
            for part in codec.parts(shape.head_dim)
        ]

    def write(self, x_NKBD: Tensor, blocks_N: Tensor) -> None:
        for pool, part in zip(self.parts, self._codec.encode(x_NKBD.float()), strict=True):
            pool[blocks_N] = part

    def read(self, slots_GL: Tensor) -> Tensor:
        """float32 [G, K, L, D]."""
        blocks, offsets = slots_GL // self._block_size, slots_GL % self._block_size
        heads_GKL = blocks[:, None] * len(self._heads_K1) + self._heads_K1
        rows = []
        for pool in self.parts:
            rows_GKL = heads_GKL * pool.shape[2] + (offsets[:, None] if pool.shape[2] > 1 else 0)
            rows.append(pool.view(-1, pool.shape[3]).index_select(0, rows_GKL.flatten()))
        return self._codec.decode(tuple(rows)).unflatten(0, heads_GKL.shape)


class QuantisedLayer:
    """Full blocks as their codecs keep them; behind the pool's slots come those of the places, which are plain.

    All layers share one ``places``: the filling ones first, which are everybody's, then each layer's open ones.
    """

    def __init__(
        self, *, keys: _Pool, values: _Pool, places: PlainLayer, num_blocks: int, block_size: int, num_filling: int, skip: int
    ) -> None:
        self.keys, self.values = keys, values
        self.places = places
        self._block_size = block_size
        self._first_place = num_blocks
        self._first_open = num_blocks + num_filling
        self._skip = skip  # open places of the layers before this one

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return (*self.keys.parts, *self.values.parts)

    def write(self, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, filling: Filling | None = None) -> None:
        assert filling is not None, "the runner says which blocks get full"
        if filling.moves_2M.numel():
            source_M, target_M = self._in_places(filling.moves_2M, size=1)
            for pool in (self.places.keys, self.places.values):
                pool[target_M] = pool[source_M]
        self.places.write(k_TKD, v_TKD, self._in_places(slots_T, size=self._block_size))
        if filling.full_2F.numel():
            place_F, block_F = filling.full_2F
            place_F = self._in_places(place_F, size=1)
            self.keys.write(self.places.keys[place_F], block_F)
            self.values.write(self.places.values[place_F], block_F)

    def gather(self, slots_GL: Tensor) -> tuple[Tensor, Tensor]:
        is_plain_GL = slots_GL >= self._first_place * self._block_size
        full_GL = slots_GL.masked_fill(is_plain_GL, 0)
        k_GKLD, v_GKLD = self.keys.read(full_GL), self.values.read(full_GL)
        rows, columns = is_plain_GL.nonzero(as_tuple=True)
        if len(rows):
            plain = self.places.gather(self._in_places(slots_GL[rows, columns], size=self._block_size)[None])
            for all_GKLD, plain_1KPD in zip((k_GKLD, v_GKLD), plain, strict=True):
                all_GKLD[rows, :, columns] = plain_1KPD[0].transpose(0, 1).to(all_GKLD.dtype)
        return k_GKLD, v_GKLD

    def copy_block(self, source: int, target: int) -> None:
        assert min(source, target) >= self._first_open, "full blocks are shared, never copied"
        self.places.copy_block(*(place - self._first_place + self._skip for place in (source, target)))

    def _in_places(self, ids: Tensor, *, size: int) -> Tensor:
        """Ids of places, or of their slots with ``size`` in each -> the same within ``self.places``."""
        return ids - self._first_place * size + (ids >= self._first_open * size) * (self._skip * size)


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """Each half of a block by its codec, when the block is full."""

    keys: Codec
    values: Codec
    is_plain: bool = False

    def bytes_per_block(self, shape: BlockShape) -> int:
        parts = (*self.keys.parts(shape.head_dim), *self.values.parts(shape.head_dim))
        return shape.num_kv_heads * sum(part.num_columns * part.num_rows(shape) for part in parts)

    def allocate(
        self, shape: BlockShape, *, num_layers: int, num_blocks: int, device: torch.device, dtype: torch.dtype, places: Places | None
    ) -> SequenceOf[QuantisedLayer]:
        assert places is not None, "blocks that are not full need a place"
        plain = PlainLayer(shape, num_blocks=places.num_filling + num_layers * places.num_open, dtype=dtype, device=device)
        return [
            QuantisedLayer(
                keys=_Pool(self.keys, shape=shape, num_blocks=num_blocks, device=device),
                values=_Pool(self.values, shape=shape, num_blocks=num_blocks, device=device),
                places=plain,
                num_blocks=num_blocks,
                block_size=shape.block_size,
                num_filling=places.num_filling,
                skip=layer * places.num_open,
            )
            for layer in range(num_layers)
        ]

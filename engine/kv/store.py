"""The pool of keys and values on the device, one layer beside the other.

Knows slots, not whose they are: who owns a block is engine.kv.manager's business, who reads it is the attention's.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from engine.kv.format import Filling, KVFormat, KVLayer
from engine.kv.placement import OpenBlocks, Placement, Places
from engine.kv.shape import BlockShape
from engine.types import StepPlan


class KVStore:
    """``num_blocks`` blocks of ``shape`` in each of ``num_layers`` layers, held in ``kv_format``.

    A format that quantises needs ``places`` for the blocks that are not full; they hold numbers of ``dtype``.
    """

    def __init__(
        self,
        kv_format: KVFormat,
        *,
        shape: BlockShape,
        num_layers: int,
        num_blocks: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        places: Places | None = None,
    ) -> None:
        assert kv_format.is_plain == (places is None), "a format has places if and only if it quantises"
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        self._open = None if places is None else OpenBlocks(places, num_blocks=num_blocks, block_size=shape.block_size)
        self._layers = kv_format.allocate(shape, num_layers=num_layers, num_blocks=num_blocks, device=device, dtype=dtype, places=places)

    def place(self, plan: StepPlan) -> Placement:
        """Where the next step's keys and values go; asked once a step, since open blocks keep their places between steps."""
        return Placement.plain(plan) if self._open is None else self._open.place(plan)

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor, filling: Filling | None = None) -> None:
        """Store a step's keys and values, [T, K, D] each, in int64 slots [T]; quantise the blocks that are full with them."""
        self._layers[layer].write(k_TKD, v_TKD, slots_T, filling)

    def copy_blocks(self, copies: SequenceOf[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in all layers, one after the other: a target may be a later copy's source."""
        for source, target in copies:
            for layer in self._layers:
                layer.copy_block(source, target)

    def read_block(self, block: int) -> bytes:
        """All that a full block holds, layer after layer."""
        shares = [pool[block].contiguous().view(torch.uint8) for layer in self._layers for pool in layer.pools]
        return b"".join(share.cpu().numpy().tobytes() for share in shares)

    def load_blocks(self, loads: SequenceOf[tuple[int, bytes]]) -> None:
        """Fill whole blocks with what ``read_block`` gave for them, or for blocks of a store like this one."""
        for block, content in loads:
            start = 0
            for share in (pool[block] for layer in self._layers for pool in layer.pools):
                stop = start + share.numel() * share.itemsize
                share.copy_(torch.frombuffer(bytearray(content[start:stop]), dtype=share.dtype).view(share.shape))
                start = stop
            assert start == len(content), "saved by a store of another shape"

    def layer(self, index: int) -> KVLayer:
        return self._layers[index]

"""The pool of keys and values on the device, one layer beside the other.

Knows slots, not whose they are: who owns a block is engine.kv.manager's business, who reads it is the attention's.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from engine.kv.format import KVFormat, KVLayer


class KVStore:
    """``num_blocks`` blocks of ``block_size`` slots in each of ``num_layers`` layers, held in ``kv_format``."""

    def __init__(
        self,
        kv_format: KVFormat,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers = [
            kv_format.allocate(num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, device=device)
            for _ in range(num_layers)
        ]

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
        """Store a step's keys and values, [T, K, D] each, in int64 slots [T]."""
        self._layers[layer].write(k_TKD, v_TKD, slots_T)

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

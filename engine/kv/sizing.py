"""How many bytes a block takes and how many blocks the pool gets; ints in, ints out, no torch.

Knows no device: the free bytes are asked elsewhere and handed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import KVCacheConfig
from engine.kv.placement import Places
from engine.kv.shape import BlockShape

if TYPE_CHECKING:
    from engine.kv.format import KVFormat

# What the pool may take of the free bytes when the settings say nothing. A CPU's memory belongs to other programs too and
# a step needs room for its logits. A GPU is ours alone once the weights are loaded. Where what a step takes was measured and
# set aside, the rest is for recorded graphs and what the allocator cannot fill; else a step needs its room there too.
_SHARE_OF_FREE = {"cpu": 0.5, "cuda": 0.8}
_SHARE_BESIDE_STEP = {"cpu": 0.5, "cuda": 0.9}


def bytes_per_block(kv_format: KVFormat, *, shape: BlockShape, num_layers: int) -> int:
    """Bytes of one full block over all layers, scales included.

    For a plain format: ``layers x 2 (key, value) x block_size x kv_heads x head_dim x bytes a number``.
    """
    return num_layers * kv_format.bytes_per_block(shape)


def open_bytes(kv_format: KVFormat, places: Places, *, shape: BlockShape, num_layers: int, dtype_bytes: int) -> int:
    """Bytes beside the pool for blocks that are not full yet; 0 for a plain format, which fills them where they lie.

    ``(layers x open places + filling places) x 2 x block_size x kv_heads x head_dim x bytes a number of the model``.
    """
    num_places = 0 if kv_format.is_plain else num_layers * places.num_open + places.num_filling
    return num_places * shape.num_numbers * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What decides the bytes that a pool takes, and those beside it.

    The places are those that steps of up to ``max_num_seqs`` sequences and ``max_num_batched_tokens`` tokens need; they hold
    numbers of ``dtype_bytes``.
    """

    kv_format: KVFormat
    shape: BlockShape
    num_layers: int
    dtype_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def block_bytes(self) -> int:
        return bytes_per_block(self.kv_format, shape=self.shape, num_layers=self.num_layers)

    def places(self, num_blocks: int) -> Places:
        return Places.for_steps(
            num_blocks=num_blocks,
            block_size=self.shape.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def bytes_beside(self, num_blocks: int) -> int:
        """What lies beside a pool of so many blocks, for those that are not full."""
        places = self.places(num_blocks)
        return open_bytes(self.kv_format, places, shape=self.shape, num_layers=self.num_layers, dtype_bytes=self.dtype_bytes)


def pool_size(
    config: KVCacheConfig,
    *,
    block_bytes: int,
    free_bytes: int,
    device_kind: str,
    bytes_beside: Callable[[int], int] = lambda _: 0,
    step_bytes: int = 0,
) -> int:
    """The number of blocks in the pool; ``bytes_beside`` so many are taken for the ones that are not full yet.

    ``kv_cache.num_blocks`` where it is given; else the most that fit, with what is beside them, in ``kv_cache.memory`` or
    in a share of ``free_bytes``: 0.5 on a CPU, 0.8 on a GPU, there 0.9 of what is left beside ``step_bytes``, which a step was
    seen to take.

    Raises:
        ValueError: not one block fits, or more blocks are asked for than are free; the message names the key.
    """

    def num_bytes(num_blocks: int) -> int:
        return num_blocks * block_bytes + bytes_beside(num_blocks)

    left = max(0, free_bytes - step_bytes)
    advice = ", or lower engine.max_num_batched_tokens or engine.max_num_seqs" if step_bytes else ""
    if config.num_blocks is not None:
        key, num_blocks = "kv_cache.num_blocks", config.num_blocks
    else:
        share = (_SHARE_BESIDE_STEP if step_bytes else _SHARE_OF_FREE)[device_kind]
        memory = int(left * share) if config.memory_bytes is None else config.memory_bytes
        key, num_blocks = "kv_cache.memory", bisect_right(range(memory // block_bytes + 1), memory, key=num_bytes) - 1
    if num_blocks < 1:
        raise ValueError(
            f"{key}: a block of {config.block_size} tokens takes {num_bytes(1):,} bytes, and not one fits; give more memory{advice}"
        )
    if num_bytes(num_blocks) > left:
        taken = f" beside the {step_bytes:,} that a step takes" if step_bytes else ""
        raise ValueError(
            f"{key}: {num_blocks:,} blocks of {config.block_size} tokens take {num_bytes(num_blocks):,} bytes, "
            f"but only {left:,} are free{taken}; give less{advice}"
        )
    return num_blocks

"""How many bytes a block takes and how many blocks the pool gets; ints in, ints out, no torch.

Knows no device: the free bytes are asked elsewhere and handed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import KVCacheConfig

if TYPE_CHECKING:
    from engine.kv.format import KVFormat

# What the pool may take of the free bytes when the settings say nothing. A CPU's memory belongs to other programs too and
# a step needs room for its logits; a GPU is ours alone once the weights are loaded.
_SHARE_OF_FREE = {"cpu": 0.5, "cuda": 0.85}


def bytes_per_block(kv_format: KVFormat, *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of one block over all layers.

    For a plain format: ``layers x 2 (key, value) x block_size x kv_heads x head_dim x bytes a number``.
    """
    return num_layers * kv_format.bytes_per_block(block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim)


def pool_size(config: KVCacheConfig, *, block_bytes: int, free_bytes: int, device_kind: str) -> int:
    """The number of blocks in the pool.

    ``kv_cache.num_blocks`` where it is given; else ``kv_cache.memory // block_bytes``; else
    ``share x free_bytes // block_bytes`` with a share of 0.5 on a CPU and 0.85 on a GPU.

    Raises:
        ValueError: not one block fits, or more blocks are asked for than are free; the message names the key.
    """
    if config.num_blocks is not None:
        key, num_blocks = "kv_cache.num_blocks", config.num_blocks
    elif config.memory_bytes is not None:
        key, num_blocks = "kv_cache.memory", config.memory_bytes // block_bytes
    else:
        key, num_blocks = "kv_cache.memory", int(free_bytes * _SHARE_OF_FREE[device_kind]) // block_bytes
    if num_blocks < 1:
        raise ValueError(f"{key}: a block of {config.block_size} tokens takes {block_bytes:,} bytes, and not one fits; give more memory")
    if num_blocks * block_bytes > free_bytes:
        raise ValueError(
            f"{key}: {num_blocks:,} blocks of {config.block_size} tokens take {num_blocks * block_bytes:,} bytes, "
            f"but only {free_bytes:,} are free; give less"
        )
    return num_blocks

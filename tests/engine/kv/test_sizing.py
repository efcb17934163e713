"""Bytes and block counts against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.config import KVCacheConfig
from engine.kv.format import load_format
from engine.kv.placement import Places
from engine.kv.shape import BlockShape
from engine.kv.sizing import bytes_per_block, pool_size

GIB = 2**30
BLOCK = 16 * 23_040  # SmolLM2-135M in bfloat16: 30 layers x 2 x 3 heads x 64 x 2 bytes = 23,040 bytes a token


def test_bytes_of_a_token():
    shape = BlockShape(block_size=16, num_kv_heads=3, head_dim=64)
    assert bytes_per_block(load_format("bf16"), shape=shape, num_layers=30) == BLOCK
    assert bytes_per_block(load_format("fp32"), shape=shape, num_layers=30) == 2 * BLOCK


@pytest.mark.parametrize(
    ("config", "device_kind", "num_blocks"),
    [
        (KVCacheConfig(num_blocks=77), "cpu", 77),
        (KVCacheConfig(memory="512MiB"), "cpu", 1456),
        (KVCacheConfig(memory=BLOCK), "cpu", 1),
        (KVCacheConfig(), "cpu", 5825),
        (KVCacheConfig(), "cuda", 9320),
    ],
)
def test_pool_size(config, device_kind, num_blocks):
    assert pool_size(config, block_bytes=BLOCK, free_bytes=4 * GIB, device_kind=device_kind) == num_blocks


@pytest.mark.parametrize(
    ("config", "free_bytes", "message"),
    [
        (KVCacheConfig(memory=BLOCK - 1), GIB, r"kv_cache\.memory: a block of 16 tokens takes 368,640 bytes"),
        (KVCacheConfig(), BLOCK, r"kv_cache\.memory: a block of 16 tokens"),
        (KVCacheConfig(num_blocks=3), 2 * BLOCK, r"kv_cache\.num_blocks: 3 blocks .* take 1,105,920 bytes, but only 737,280 are free"),
        (KVCacheConfig(memory="2GiB"), GIB, r"kv_cache\.memory: 5,825 blocks"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(config, free_bytes, message):
    with pytest.raises(ValueError, match=message):
        pool_size(config, block_bytes=BLOCK, free_bytes=free_bytes, device_kind="cpu")


def test_what_a_step_takes_is_kept_free():
    sizes = {"block_bytes": BLOCK, "free_bytes": 10 * BLOCK, "device_kind": "cuda", "step_bytes": 4 * BLOCK}
    assert pool_size(KVCacheConfig(), **sizes) == 5, "0.9 of six blocks"
    assert pool_size(KVCacheConfig(num_blocks=6), **sizes) == pool_size(KVCacheConfig(memory=6 * BLOCK), **sizes) == 6
    advice = r"or lower engine\.max_num_batched_tokens or engine\.max_num_seqs"
    with pytest.raises(
        ValueError, match=r"kv_cache\.num_blocks: 7 .* only 2,211,840 are free beside the 1,474,560 that a step takes; .*" + advice
    ):
        pool_size(KVCacheConfig(num_blocks=7), **sizes)
    with pytest.raises(ValueError, match=r"kv_cache\.memory: a block of 16 tokens takes 368,640 bytes, and not one fits; .*" + advice):
        pool_size(KVCacheConfig(), **sizes | {"step_bytes": 11 * BLOCK})


@pytest.mark.parametrize(("memory", "num_blocks"), [(BLOCK, 0), (3 * BLOCK, 1), (29 * BLOCK, 9), (30 * BLOCK, 10), (32 * BLOCK, 12)])
def test_what_lies_beside_the_pool_is_counted(memory, num_blocks):
    """Two blocks' bytes for each of the first ten blocks, none for the others: the most that fit."""
    config = KVCacheConfig(memory=memory)
    sizes = {"block_bytes": BLOCK, "free_bytes": GIB, "device_kind": "cpu", "bytes_beside": lambda n: 2 * BLOCK * min(n, 10)}
    if num_blocks:
        assert pool_size(config, **sizes) == num_blocks
    else:
        with pytest.raises(ValueError, match=r"kv_cache\.memory: a block of 16 tokens takes 1,105,920 bytes, and not one fits"):
            pool_size(config, **sizes)
    with pytest.raises(ValueError, match=r"kv_cache\.num_blocks: 3 blocks of 16 tokens take 3,317,760 bytes, but only 3,317,759 are free"):
        pool_size(KVCacheConfig(num_blocks=3), **sizes | {"free_bytes": 9 * BLOCK - 1})


def test_places_hold_any_step():
    """Each of 4 sequences may fill the block that it began with a token, and new ones with 16."""
    shape = {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    assert Places.for_steps(num_blocks=100, **shape) == Places(num_open=4, num_filling=6)
    assert Places.for_steps(num_blocks=3, **shape) == Places(num_open=3, num_filling=3)
    assert Places.for_steps(num_blocks=100, **shape | {"block_size": 1}) == Places(num_open=4, num_filling=40)


def test_sizing_needs_no_torch():
    code = "import sys, engine.kv.sizing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

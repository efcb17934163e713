"""Bytes and block counts against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.config import KVCacheConfig
from engine.kv.format import load_format
from engine.kv.sizing import bytes_per_block, pool_size

GIB = 2**30
BLOCK = 16 * 23_040  # SmolLM2-135M in bfloat16: 30 layers x 2 x 3 heads x 64 x 2 bytes = 23,040 bytes a token


def test_bytes_of_a_token():
    assert bytes_per_block(load_format("bf16"), num_layers=30, block_size=16, num_kv_heads=3, head_dim=64) == BLOCK
    assert bytes_per_block(load_format("fp32"), num_layers=30, block_size=16, num_kv_heads=3, head_dim=64) == 2 * BLOCK


@pytest.mark.parametrize(
    ("config", "device_kind", "num_blocks"),
    [
        (KVCacheConfig(num_blocks=77), "cpu", 77),
        (KVCacheConfig(memory="512MiB"), "cpu", 1456),
        (KVCacheConfig(memory=BLOCK), "cpu", 1),
        (KVCacheConfig(), "cpu", 5825),
        (KVCacheConfig(), "cuda", 9903),
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


def test_sizing_needs_no_torch():
    code = "import sys, engine.kv.sizing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

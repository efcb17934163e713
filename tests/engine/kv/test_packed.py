"""The packed pool against plain indexing: what is written comes back, where kv.h says it lies, and nothing else changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.kernels.cpu import build
from engine.kv.format import load_format
from engine.kv.packed import PackedFormat
from engine.kv.shape import BlockShape
from engine.kv.store import KVStore


@pytest.fixture(scope="module", params=build.TIERS)
def packed(request):
    try:
        return PackedFormat(build.load(request.param))
    except build.Unavailable as reason:
        pytest.skip(str(reason))


def only_layer(packed, *, num_blocks: int, **sizes):
    return KVStore(packed, shape=BlockShape(**sizes), num_layers=1, num_blocks=num_blocks, device=torch.device("cpu")).layer(0)


@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(3, 64, 16), (1, 16, 48), (2, 80, 32)])
def test_every_number_lies_where_the_layout_says(packed, num_kv_heads, head_dim, block_size):
    layer = only_layer(packed, num_blocks=4, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim)
    num_slots = 4 * block_size
    k, v = torch.randn(2, num_slots, num_kv_heads, head_dim).bfloat16()
    order = torch.randperm(num_slots)
    layer.write(k[order], v[order], order)

    k_NKBD, v_NKBD = (rows.view(4, block_size, num_kv_heads, head_dim).transpose(1, 2) for rows in (k, v))
    groups = k_NKBD.reshape(4, num_kv_heads, block_size // 16, 16, head_dim // 2, 2).transpose(3, 4)
    pairs = v_NKBD.reshape(4, num_kv_heads, block_size // 2, 2, head_dim).transpose(3, 4)
    assert torch.equal(layer.pool[:, :, 0], groups.flatten(2))
    assert torch.equal(layer.pool[:, :, 1], pairs.flatten(2))


def test_reads_back_what_was_written_and_leaves_other_slots_alone(packed):
    layer = only_layer(packed, num_blocks=6, block_size=16, num_kv_heads=2, head_dim=32)
    layer.pool.fill_(torch.nan)
    slots = torch.randperm(96)[:37]
    k, v = torch.randn(2, 37, 2, 32).bfloat16()
    layer.write(k, v, slots)
    read = layer.gather(torch.arange(96).view(4, 24))
    unwritten = torch.ones(96, dtype=torch.bool).index_fill(0, slots, False)
    for part, written in zip(read, (k, v), strict=True):
        assert part.is_contiguous()
        rows = part.transpose(1, 2).flatten(0, 1)
        assert torch.equal(rows[slots], written)
        assert rows[unwritten].isnan().all()


def test_a_block_is_copied_whole(packed):
    layer = only_layer(packed, num_blocks=3, block_size=16, num_kv_heads=2, head_dim=16)
    k, v = torch.randn(2, 48, 2, 16).bfloat16()
    layer.write(k, v, torch.arange(48))
    layer.copy_block(2, 0)
    read_k, read_v = layer.gather(torch.arange(48).view(3, 16))
    for read in (read_k, read_v):
        assert torch.equal(read[0], read[2]) and not torch.equal(read[0], read[1])


def test_threads_may_write_the_two_tokens_of_a_pair_at_once(packed):
    layer = only_layer(packed, num_blocks=64, block_size=16, num_kv_heads=4, head_dim=64)
    k, v = torch.randn(2, 1024, 4, 64).bfloat16()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            layer.pool.zero_()
            halves = [torch.arange(start, 1024, 2) for start in (0, 1)]
            list(pool.map(lambda slots: layer.write(k[slots], v[slots], slots), halves))
            read_k, read_v = layer.gather(torch.arange(1024)[None])
            assert torch.equal(read_k[0].transpose(0, 1), k) and torch.equal(read_v[0].transpose(0, 1), v)


def test_takes_the_bytes_of_its_plain_twin(packed):
    sizes = {"block_size": 32, "num_kv_heads": 3, "head_dim": 64}
    layer, shape = only_layer(packed, num_blocks=5, **sizes), BlockShape(**sizes)
    assert layer.pool.numel() * layer.pool.itemsize == 5 * packed.bytes_per_block(shape)
    assert packed.bytes_per_block(shape) == load_format("bf16").bytes_per_block(shape)

"""What is written to a slot comes back from it, in every format; slots nobody wrote stay apart."""

from __future__ import annotations

import pytest
import torch

from engine import plugins
from engine.kv.format import format_name, load_format
from engine.kv.shape import BlockShape
from engine.kv.store import KVStore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("block_size", [1, 16])
def test_reads_back_what_was_written(name, block_size):
    num_slots = 96
    store = KVStore(
        load_format(name),
        shape=BlockShape(block_size=block_size, num_kv_heads=3, head_dim=8),
        num_layers=2,
        num_blocks=num_slots // block_size,
        device=torch.device("cpu"),
    )
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))
    k, v = torch.randn(2, num_slots, 3, 8)
    store.write(1, k[:40], v[:40], order[:40])
    store.write(1, k[40:], v[40:], order[40:])
    store.write(0, -k, -v, order)
    read_k, read_v = store.layer(1).gather(order.view(8, 12))
    assert torch.equal(read_k.transpose(1, 2).flatten(0, 1), k.to(DTYPES[name]))
    assert torch.equal(read_v.transpose(1, 2).flatten(0, 1), v.to(DTYPES[name]))


def test_writing_leaves_other_slots_alone():
    device = torch.device("cpu")
    shape = BlockShape(block_size=4, num_kv_heads=2, head_dim=8)
    store = KVStore(load_format("fp32"), shape=shape, num_layers=1, num_blocks=4, device=device)
    layer = store.layer(0)
    layer.keys.fill_(torch.nan)
    layer.values.fill_(torch.nan)
    slots = torch.tensor([3, 9])
    layer.write(torch.ones(2, 2, 8), torch.ones(2, 2, 8), slots)
    k, v = layer.gather(torch.arange(16)[None])
    written = torch.zeros(16, dtype=torch.bool).index_fill(0, slots, True)
    for part in (k[0], v[0]):
        assert torch.equal(part[:, written], torch.ones(2, 2, 8))
        assert part[:, ~written].isnan().all()


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items())
def test_a_block_takes_the_bytes_that_are_allocated(name, dtype):
    device = torch.device("cpu")
    shape = BlockShape(block_size=16, num_kv_heads=3, head_dim=64)
    layer = KVStore(load_format(name), shape=shape, num_layers=1, num_blocks=5, device=device).layer(0)
    held = layer.keys.numel() * layer.keys.itemsize + layer.values.numel() * layer.values.itemsize
    assert load_format(name).bytes_per_block(shape) * 5 == held


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_block_goes_from_one_store_to_another_as_bytes(name):
    shape = BlockShape(block_size=4, num_kv_heads=3, head_dim=8)

    def store() -> KVStore:
        return KVStore(load_format(name), shape=shape, num_layers=2, num_blocks=6, device=torch.device("cpu"))

    first, second = store(), store()
    slots = torch.arange(24)
    for layer in range(2):
        first.write(layer, *torch.randn(2, 24, 3, 8), slots)
        second.write(layer, *torch.randn(2, 24, 3, 8), slots)
    before = [second.layer(layer).gather(slots[None]) for layer in range(2)]
    content = first.read_block(1)
    assert len(content) == 2 * load_format(name).bytes_per_block(shape)
    second.load_blocks([(4, content)])
    moved = torch.zeros(24, dtype=torch.bool).index_fill(0, slots[16:20], True)
    for layer in range(2):
        parts = zip(first.layer(layer).gather(slots[None]), second.layer(layer).gather(slots[None]), before[layer], strict=True)
        for theirs, ours, was in parts:
            assert torch.equal(ours[0, :, 16:20], theirs[0, :, 4:8])
            assert torch.equal(ours[0, :, ~moved], was[0, :, ~moved])
    assert second.read_block(4) == content


def test_auto_is_the_models_dtype():
    for name, dtype in DTYPES.items():
        assert format_name("auto", model_dtype=str(dtype).removeprefix("torch.")) == name
    assert format_name("bf16", model_dtype="float32") == "bf16"


def test_every_file_is_a_format_and_an_unknown_one_is_refused():
    for name in plugins.names("engine.kv.formats"):
        assert load_format(name).bytes_per_block(BlockShape(block_size=1, num_kv_heads=1, head_dim=64)) > 0
    with pytest.raises(ValueError, match=r"kv_cache\.format: there is no 'fp33'; choose one of bf16, .*fp32"):
        load_format("fp33")

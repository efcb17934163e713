"""The engine over each KV format that quantises: the same answers in any company, and how much worse the model gets."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, Forecast, KVCacheConfig, ModelConfig, Request, SamplingParams

NAMES = ("int8", "fp8", "fp4")
SHARED = Path(__file__).parents[3] / "shared" / "reference" / "smollm2_perplexity.json"


def make(path: str, kv_format: str, *, num_blocks: int = 400, prefix_cache: bool = True, dtype: str = "float32", **settings) -> Engine:
    return Engine.from_config(
        model=ModelConfig(path=path, dtype=dtype),
        engine=EngineConfig(**{"batch_invariant": True, "max_num_seqs": 16, "threads": 1, "device": "cpu"} | settings),
        kv_cache=KVCacheConfig(format=kv_format, num_blocks=num_blocks, prefix_cache=prefix_cache),
    )


def rows(count: int) -> list[Request]:
    """Families that share long beginnings; greedy and drawn answers, several samples, beams, prompts that are scored."""
    dice = random.Random(3)
    stems = [[dice.randrange(97, 123) for _ in range(70)] for _ in range(3)]
    kinds = [
        {"temperature": 0.0},
        {"seed": 5},
        {"n": 3, "seed": 6},
        {"num_beams": 3, "n": 2, "temperature": 0.0},
        {"temperature": 0.0, "prompt_logprobs": 0},
    ]
    return [
        Request(
            id=i,
            prompt_token_ids=dice.choice(stems) + [dice.randrange(97, 123) for _ in range(dice.randrange(1, 40))],
            sampling=SamplingParams(max_tokens=dice.randrange(4, 40), ignore_eos=i % 5 != 3, **kinds[i % 5]),
        )
        for i in range(count)
    ]


def numbers(engine: Engine, requests: list[Request]) -> dict:
    found: dict = {}
    for completion in engine.generate(requests):
        assert completion.finish_reason != "error", completion
        found.setdefault(completion.request_id, []).append((completion.token_ids, completion.logprobs, completion.prompt_logprobs))
    return found


@pytest.mark.parametrize("kv_format", NAMES)
def test_answers_do_not_depend_on_company_budget_preemption_or_reuse(tiny_model, kv_format):
    """Bit for bit, also where one engine computes a prefix that the other takes from the cache."""
    requests = rows(25)
    alone = make(tiny_model, kv_format, prefix_cache=False)
    expected = {}
    for request in requests:
        expected |= numbers(alone, [request])
    together = make(tiny_model, kv_format)
    assert numbers(together, requests) == expected
    assert together.stats.num_cached_tokens > 500
    assert numbers(together, requests[::-1]) == expected, "a second time, from the cache"
    assert numbers(make(tiny_model, kv_format, max_num_batched_tokens=16), requests[::-1]) == expected
    squeezed = make(tiny_model, kv_format, num_blocks=20)
    assert numbers(squeezed, requests) == expected
    assert squeezed.stats.num_preemptions > 0
    assert squeezed.scheduler.kv.num_held == 0


@pytest.mark.parametrize("kv_format", NAMES)
def test_a_second_copy_takes_whole_blocks_from_the_cache(tiny_model, kv_format):
    engine = make(tiny_model, kv_format)
    prompt = list(range(60, 110))
    first, second = (
        next(iter(engine.generate([Request(id=0, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=20, temperature=0.0))])))
        for _ in range(2)
    )
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 48)
    assert first.token_ids == second.token_ids and first.logprobs == second.logprobs


def loss(engine: Engine, prompts: list[list[int]]) -> float:
    """Mean of -log probability over all tokens but the first ones."""
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    found = list(engine.generate(Request(id=i, prompt_token_ids=ids, sampling=scored) for i, ids in enumerate(prompts)))
    assert all(completion.finish_reason == "length" for completion in found)
    logprobs = [logprob for completion in found for logprob in completion.prompt_logprobs]
    return -math.fsum(logprobs) / len(logprobs)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize(("kv_format", "most"), [("int8", 0.002), ("fp8", 0.02), ("fp4", 0.1)])
def test_a_tiny_model_hardly_notices(tiny_model, kv_format, most, attention):
    """A random model says what its numbers say: its loss moves as far as these do, up or down."""
    dice = random.Random(1)
    prompts = [[dice.randrange(200) for _ in range(150)] for _ in range(8)]
    settings = {"attention": attention, "batch_invariant": False}
    plain, quantised = (loss(make(tiny_model, name, **settings), prompts) for name in ("fp32", kv_format))
    assert 0 < abs(quantised - plain) < most * plain


@pytest.mark.full
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
@pytest.mark.parametrize(("kv_format", "least", "most"), [("int8", -0.02, 0.02), ("fp8", -0.06, 0.06), ("fp4", -0.06, 0.3)])
def test_perplexity_of_the_embedded_model(embedded_model, kv_format, least, most, attention):
    if not SHARED.is_file():
        pytest.skip("the reference pages beside the project are not here")
    reference = json.loads(SHARED.read_text())
    engine = make(embedded_model.path, kv_format, num_blocks=3000, attention=attention, batch_invariant=False, threads=None)
    perplexity = math.exp(loss(engine, [page["token_ids"] for page in reference["pages"]]))
    assert least <= perplexity - reference["perplexity"] <= most


@pytest.mark.parametrize("attention", ["auto", "cpu", "sdpa"])
def test_a_format_that_there_is_none_of_is_all_that_is_said(embedded_model, attention, caplog):
    """Not that a backend lacks it, or which one is taken in its place."""
    with pytest.raises(ValueError, match=r"^kv_cache\.format: there is no 'int4'; choose one of .*int8"):
        make(embedded_model.path, "int4", dtype="bfloat16", attention=attention, batch_invariant=False)
    assert not caplog.messages


@pytest.mark.parametrize(("kv_format", "most"), [("int8", 0.54), ("fp8", 0.51), ("fp4", 0.29)])
def test_bytes_of_a_token_as_metrics_tell(embedded_model, kv_format, most):
    """Of a pool of 4 GiB, what open blocks take in it included."""

    def bytes_per_token(name: str) -> float:
        forecast = Forecast.from_config(
            model=embedded_model,
            engine=EngineConfig(device="cpu"),
            kv_cache=KVCacheConfig(format=name, memory="4GiB"),
        )
        return 4 * 2**30 / (forecast.pool.num_blocks * forecast.pool.block_size)

    assert bytes_per_token(kv_format) <= most * bytes_per_token("bf16")

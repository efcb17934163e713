"""job=chat: a prompt becomes a user message, goes through the model's chat template, and is answered."""

from __future__ import annotations

from engine import SamplingParams, Tokenizer
from pipeline import Job, PromptOptions, Prompts, TextJob


def make(tokenizer: Tokenizer, *, prompt: PromptOptions, sampling: SamplingParams, max_model_len: int | None = None) -> Job:
    return TextJob(Prompts(tokenizer, options=prompt, sampling=sampling, chat=True, max_model_len=max_model_len))

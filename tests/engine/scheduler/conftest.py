"""An engine whose model writes what it is told to: the real loop, scheduler and tokenizer around a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.kv.manager import BlockManager
from engine.loop import Engine
from engine.sampling_params import SamplingParams
from engine.scheduler.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from engine.types import Completion, Draw, Request, StepPlan


class ScriptedRunner:
    """Draws ``script``'s tokens one after the other for every sequence, then the end token."""

    def __init__(self, script: Sequence[int], *, end: int) -> None:
        self.script = script
        self.end = end

    def run(self, plan: StepPlan) -> list[Draw]:
        return [self.draw(chunk.seq.num_generated) for chunk in plan.sampling for _ in range(chunk.seq.num_draws)]

    def draw(self, position: int) -> Draw:
        return Draw(self.script[position] if position < len(self.script) else self.end, -1.0)


@pytest.fixture(scope="session")
def forced(embedded_tokenizer: Tokenizer) -> Callable[..., Completion]:
    """``forced(text, **sampling)`` is the completion of a model that writes ``text`` (or token ids) and then ends."""

    def build(text: str | Sequence[int], **sampling: Any) -> Completion:
        (end,) = embedded_tokenizer.eos_token_ids
        script = embedded_tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
        scheduler = Scheduler(
            kv=BlockManager(num_blocks=64, block_size=16),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=1000,
            eos_token_ids={end},
            vocab_size=embedded_tokenizer.vocab_size,
            vocabulary=embedded_tokenizer,
        )
        engine = Engine(scheduler=scheduler, runner=ScriptedRunner(script, end=end))
        prompt = embedded_tokenizer.encode("Write it down")
        request = Request(id=0, prompt_token_ids=prompt, sampling=SamplingParams(**{"max_tokens": 200} | sampling))
        (completion,) = engine.generate([request])
        return completion

    return build

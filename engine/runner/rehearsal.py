"""Steps that nobody asked for, run before the first real one: the largest, to see what it takes, then one of each shape.

Knows how plans look and which settings cost most. They go to a runner as they are, past the scheduler: their blocks are
written and never read again, so nothing of them is cached, counted or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine.runner.buckets import bucket_sizes
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.types import Chunk, Request, StepPlan

if TYPE_CHECKING:
    from engine.loop import Runner

# Every part of the sampler that takes memory: adjusted logits, all filters, and others' log probabilities.
_COSTLY = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20, prompt_logprobs=20)
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """The steps of an engine with these settings."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def num_blocks(self) -> int:
        """Blocks that the largest steps write."""
        return 1 + max(block for plan in self.largest() for chunk in plan.chunks for block in chunk.seq.blocks)

    def largest(self) -> tuple[StepPlan, StepPlan]:
        """The step with the most rows to draw for and the one with the most to score, with the costliest settings.

        ``max_num_seqs`` prompts fill the budget between them, or one does alone. Block tables are as wide as any.
        """
        return self._prompts(self.max_num_seqs), self._prompts(1)

    def step_bytes(self, runner: Runner, peak_bytes: Callable[[Callable[[], object]], int]) -> int:
        """What any step takes beside weights and pool: ``peak_bytes`` of the largest on ``runner``, which has ``num_blocks`` blocks.

        Raises:
            ValueError: it cannot be computed at all; the message names the keys.
        """
        try:
            return max(peak_bytes(partial(runner.run, plan)) for plan in self.largest())
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"engine.max_num_batched_tokens: a step of {self.max_num_batched_tokens:,} tokens for {self.max_num_seqs:,} sequences "
                f"takes more memory than the weights leave; lower it or engine.max_num_seqs ({error})"
            ) from error

    def _prompts(self, num_seqs: int) -> StepPlan:
        share, more = divmod(self.max_num_batched_tokens, num_seqs)
        max_blocks = -(-self.max_model_len // self.block_size)
        chunks: list[Chunk] = []
        next_block = 0
        for index in range(num_seqs):
            num_tokens = min(share + (index < more), self.max_model_len)
            end = next_block + -(-num_tokens // self.block_size)
            seq = _sequence(index, num_tokens, range(next_block, end), sampling=_COSTLY)
            seq.blocks += [0] * (max_blocks - len(seq.blocks))
            chunks.append(Chunk(seq, 0, num_tokens, samples=True, scores=range(1, num_tokens)))
            next_block = end
        return StepPlan(tuple(chunks))

    def warm_up(self, runner: Runner, *, num_blocks: int) -> None:
        """Run a step of each shape on ``runner``, whose pool has ``num_blocks`` blocks: the first of a shape may take seconds.

        Raises:
            ValueError: the pool leaves too little memory for that; the message names the keys.
        """
        try:
            for plan in self.shapes(num_blocks=num_blocks):
                runner.run(plan)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"kv_cache.memory: the {num_blocks:,} blocks leave too little for the steps; give less, or lower "
                f"engine.max_num_batched_tokens or engine.max_num_seqs ({error})"
            ) from error

    def shapes(self, *, num_blocks: int) -> Iterator[StepPlan]:
        """A prompt, then decodes alone in each size, the largest first, whose memory the others share; drawn for in all ways."""
        num_tokens = min(self.max_num_batched_tokens, self.max_model_len, num_blocks * self.block_size)
        blocks = range(-(-num_tokens // self.block_size))
        yield StepPlan((Chunk(_sequence(0, num_tokens, blocks, sampling=_COSTLY), 0, num_tokens, samples=True),))
        for num_seqs in sorted({min(size, num_blocks) for size in bucket_sizes(self.max_num_seqs)}, reverse=True):
            seqs = [_sequence(i, 1, range(i, i + 1), sampling=_GREEDY if i % 2 else _COSTLY) for i in range(num_seqs)]
            yield StepPlan(tuple(Chunk(seq, 0, 1, samples=True) for seq in seqs))


def _sequence(index: int, num_tokens: int, blocks: range, *, sampling: SamplingParams) -> Sequence:
    seq = Sequence(Request(id=index, prompt_token_ids=[0] * num_tokens, sampling=sampling), max_len=num_tokens + 1)
    seq.blocks = list(blocks)
    return seq

"""What a step's sequences compute next, while its draws are still on the device.

Knows chunks, tokens and blocks; it takes no block from anybody: where that is needed, or where what is drawn next hangs on
what is drawn now, the host has to wait.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.kv.manager import BlockManager
from engine.sequence import Sequence
from engine.types import Chunk, StepPlan


def go_on(plan: StepPlan, running: Collection[Sequence], *, kv: BlockManager, budget: int) -> list[Chunk] | None:
    """The chunks of ``running`` after ``plan``, a token for each and the prefills' share of ``budget``; None: wait for the draws.

    A sequence that has drawn goes on from a token that is not known yet. One whose answer is then as long as it may be has no
    chunk. One that turns out to have ended computes that token in vain.
    """
    chunk_of = {chunk.seq: chunk for chunk in plan.chunks}
    if not all(seq in chunk_of and _may_go_on(chunk_of[seq]) for seq in running):
        return None
    for seq in running:
        seq.num_unknown = int(chunk_of[seq].samples)
    going = [seq for seq in running if len(seq.tokens) + seq.num_unknown < seq.max_len or not seq.num_unknown]
    spare = budget - len(going)
    chunks = []
    for seq in going:
        start = chunk_of[seq].start + chunk_of[seq].num_tokens
        num_pending = len(seq.tokens) + seq.num_unknown - start
        num_tokens = min(num_pending, spare + 1)
        if not kv.reserve(seq, start - seq.num_computed + num_tokens):
            return None
        chunks.append(Chunk(seq, start, num_tokens, samples=num_tokens == num_pending))
        spare -= num_tokens - 1
    return chunks


def _may_go_on(chunk: Chunk) -> bool:
    """Whether what comes after the chunk can be told without what it draws: a beam, a form and a penalty need to know that."""
    seq = chunk.seq
    if seq.scores_prompt:
        return len(seq.prompt_scores) + 1 >= seq.num_prompt and _needs_no_tokens(seq)
    return not chunk.samples or _needs_no_tokens(seq)


def _needs_no_tokens(seq: Sequence) -> bool:
    is_free = seq.beams is None and seq.grammar is None and seq.tally is None and not seq.rules.bad_words
    return is_free and seq.num_draws == 1 and seq.draws

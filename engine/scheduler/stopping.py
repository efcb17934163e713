"""When a sequence is finished, and what to call it.

Looks at tokens only; it does not know text, blocks or the queue.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.sequence import Sequence
from engine.types import FinishReason

Ending = tuple[FinishReason, int | str | None]


def finish(seq: Sequence, *, eos_token_ids: Collection[int]) -> Ending | None:
    """The finish reason and stop reason of ``seq`` after its newest token, or None while it goes on.

    An end token or one of ``stop_token_ids`` gives ("stop", its id); ``max_tokens`` gives ("length", None); the
    context's end before that gives ("length", "context").
    """
    sampling, token_id = seq.request.sampling, seq.tokens[-1]
    if token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos):
        return "stop", token_id
    if seq.num_generated >= sampling.max_tokens:
        return "length", None
    if len(seq.tokens) >= seq.max_len:
        return "length", "context"
    return None

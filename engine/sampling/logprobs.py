"""Reads log probabilities off logits: of a given token, of the most likely ones, of a beam's candidates.

Knows rows of logits and what their requests ask for; draws nothing.
Shape suffixes: M rows, V vocabulary, N token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as SequenceOf
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.sampling.adjust import adjust
from engine.sequence import Sequence
from engine.transfer import Fetch, sent
from engine.types import NOT_A_NUMBER, Draw

Top = tuple[tuple[int, float], ...]

_CACHE_BYTES = 1 << 20  # a core's own cache, of which some is left for results


def score(logits_MV: Tensor, token_ids_M: Tensor, *, num_top: SequenceOf[int], extra_ids: SequenceOf[SequenceOf[int]] = ()) -> list[Draw]:
    """The log-softmax of plain float32 logits [M, V] at one token a row, with what else each row asks for.

    That is its ``num_top`` most likely tokens, the most likely first, or the tokens of ``extra_ids`` where it names some;
    both are cut to the vocabulary. A row that holds NaN or +inf gives token id NOT_A_NUMBER.
    """
    return scored(logits_MV, token_ids_M, num_top=num_top, extra_ids=extra_ids)()


def scored(
    logits_MV: Tensor, token_ids_M: Tensor, *, num_top: SequenceOf[int], extra_ids: SequenceOf[SequenceOf[int]] = ()
) -> Callable[[], list[Draw]]:
    """``score``, which the device has been asked for; the call waits for it."""
    parts = []
    for rows in portions([1] * len(logits_MV), at_once=rows_at_once(logits_MV)):
        logprobs_MV = torch.log_softmax(logits_MV[rows], dim=-1)
        logprobs_M = logprobs_MV.gather(1, token_ids_M[rows, None]).squeeze(1)
        extras = extra_ids[rows] if extra_ids else [()] * len(logprobs_MV)
        tops = [_top(logprobs_V, count, ids) for logprobs_V, count, ids in zip(logprobs_MV, num_top[rows], extras, strict=True)]
        parts.append((Fetch(token_ids_M[rows]), Fetch(logprobs_M), tops))

    def read() -> list[Draw]:
        return [
            Draw(NOT_A_NUMBER, math.nan) if math.isnan(logprob) else Draw(token_id, logprob, top())
            for token_ids, logprobs, tops in parts
            for token_id, logprob, top in zip(token_ids.tolist(), logprobs.tolist(), tops, strict=True)
        ]

    return read


def rows_at_once(logits_MV: Tensor) -> int:
    """Rows to go over together: on a CPU so few that they stay in its cache from pass to pass, else as many as there are.

    For 49,152 tokens that is 5 rows, which takes a third of the time of 256 at once.
    """
    if logits_MV.device.type != "cpu":
        return len(logits_MV)
    return _CACHE_BYTES // (logits_MV.shape[-1] * logits_MV.element_size())


def portions(counts: SequenceOf[int], *, at_once: int) -> list[slice]:
    """Neighbours whose counts, each at least 1, come to at most ``at_once``, or one that counts more alone."""
    starts, total = [], at_once
    for index, count in enumerate(counts):
        total += count
        if total > at_once:
            starts.append(index)
            total = count
    return [slice(start, end) for start, end in pairwise((*starts, len(counts)))]


def candidates(logits_MV: Tensor, seqs: SequenceOf[Sequence], *, num_valid_tokens: int) -> list[list[Draw]]:
    """Float32 logits [M, V], row m for the beam ``seqs[m]`` -> its ``num_draws`` best next tokens, the best first.

    They are ranked by the log-softmax after the row's adjustments, which is not normalised again, as in transformers; of
    equal ones the lower id comes first. Ids from ``num_valid_tokens`` on have no probability. A row that holds NaN or
    +inf gives token ids NOT_A_NUMBER.
    """
    logprobs_MV = torch.log_softmax(logits_MV, dim=-1)
    adjusted_MV = adjust(logprobs_MV[:, :num_valid_tokens], seqs)
    adjusted_MV = F.pad(adjusted_MV, (0, logits_MV.shape[-1] - adjusted_MV.shape[-1]), value=-torch.inf)
    return [_best(*row) for row in zip(logprobs_MV, adjusted_MV, seqs, strict=True)]


def _best(logprobs_V: Tensor, adjusted_V: Tensor, seq: Sequence) -> list[Draw]:
    if bool(logprobs_V.isnan().any()):
        return [Draw(NOT_A_NUMBER, math.nan)] * seq.num_draws
    last = adjusted_V.topk(seq.num_draws).values[-1]
    level_N = (adjusted_V >= last).nonzero().squeeze(1)  # in id order, and more than are wanted where several are the last
    order_N = adjusted_V[level_N].sort(descending=True, stable=True).indices
    best_N = level_N[order_N[: seq.num_draws]]
    params = seq.request.sampling
    top = _top(logprobs_V, params.logprobs or 0, params.logprob_token_ids)()
    values = zip(best_N.tolist(), logprobs_V[best_N].tolist(), adjusted_V[best_N].tolist(), strict=True)
    return [Draw(token_id, logprob, top, adjusted) for token_id, logprob, adjusted in values]


def _top(logprobs_V: Tensor, num_top: int, extra_ids: SequenceOf[int]) -> Callable[[], Top]:
    ids = [token_id for token_id in extra_ids if token_id < len(logprobs_V)]
    if ids:
        named = Fetch(logprobs_V[sent(ids, dtype=torch.int64, device=logprobs_V.device)])
        return lambda: tuple(zip(ids, named.tolist(), strict=True))
    if num_top == 0:
        return tuple
    values_N, indices_N = logprobs_V.topk(min(num_top, len(logprobs_V)))
    values, indices = Fetch(values_N), Fetch(indices_N)
    return lambda: tuple(zip(indices.tolist(), values.tolist(), strict=True))

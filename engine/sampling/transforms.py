"""From the logits that the rules leave to the ones that a token is drawn from: pure functions, and their order.

Names, meaning and order are vLLM's: temperature, min_p, top_k, top_p, each on what the one before left. A ruled-out token
has logit -inf; the largest logit is never ruled out. Equal logits rank by token id, the lower first, so top_k keeps
exactly k tokens and top_k=1 is greedy. No row's result depends on the rows beside it.
Shape suffixes: R rows, V vocabulary, N leading ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

# Below this a temperature picks the largest logit anyway; float32 could not hold the quotients.
_MIN_TEMPERATURE = 1e-30
# Ranks that top_p looks at first; rows whose mass they do not hold look at 16 times as many, up to the vocabulary. They
# nearly always hold it, and sorting a whole vocabulary is slow.
_NUM_LEADING = 256


def temperature(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """``(logits - max) / temperature``; the shift leaves the distribution as it is and keeps small temperatures finite."""
    return (logits_RV - logits_RV.amax(-1, keepdim=True)) / temperature_R.clamp(min=_MIN_TEMPERATURE)[:, None]


def min_p(logits_RV: Tensor, min_p_R: Tensor) -> Tensor:
    """Keep the tokens whose probability is at least ``min_p`` times that of the likeliest one."""
    floor_R = logits_RV.amax(-1, keepdim=True) + min_p_R.log()[:, None]
    return logits_RV.masked_fill(logits_RV < floor_R, -torch.inf)


def top_k(logits_RV: Tensor, top_k_R: Tensor) -> Tensor:
    """Keep the ``top_k`` largest logits; ``top_k`` is at most the vocabulary's size."""
    ranked_RN = logits_RV.topk(int(top_k_R.max()), dim=-1).values
    keep_RV = _leading(logits_RV, last_R=_at(ranked_RN, top_k_R - 1), num_keep_R=top_k_R)
    return torch.where(keep_RV, logits_RV, -torch.inf)


def top_p(logits_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities sum to at least ``top_p`` (Holtzman et al. 2020)."""
    num_rows, vocab_size = logits_RV.shape
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    num_keep_R = torch.zeros(num_rows, dtype=torch.int64, device=logits_RV.device)
    last_R = torch.zeros(num_rows, device=logits_RV.device)
    num_ranks = min(_NUM_LEADING, vocab_size)
    while len(open_R := (num_keep_R == 0).nonzero().squeeze(1)) > 0:
        ranked_RN = logprobs_RV[open_R].topk(num_ranks, dim=-1).values
        mass_RN = ranked_RN.exp().cumsum(-1, dtype=torch.float64)
        needed_R = (mass_RN < top_p_R[open_R, None]).sum(-1) + 1
        if num_ranks == vocab_size:
            needed_R = needed_R.clamp(max=vocab_size)  # rounding kept the whole mass under top_p
        reached_R = needed_R <= num_ranks
        num_keep_R[open_R[reached_R]] = needed_R[reached_R]
        last_R[open_R[reached_R]] = _at(ranked_RN, needed_R.clamp(max=num_ranks) - 1)[reached_R]
        num_ranks = min(16 * num_ranks, vocab_size)
    return torch.where(_leading(logprobs_RV, last_R=last_R, num_keep_R=num_keep_R), logits_RV, -torch.inf)


def _at(ranked_RN: Tensor, rank_R: Tensor) -> Tensor:
    return ranked_RN.gather(-1, rank_R[:, None]).squeeze(1)


def _leading(scores_RV: Tensor, *, last_R: Tensor, num_keep_R: Tensor) -> Tensor:
    """Where each row's ``num_keep`` largest scores are, of which ``last`` is the smallest; of equal ones the lower ids."""
    last_R1 = last_R[:, None]
    keep_RV = scores_RV >= last_R1
    if bool((keep_RV.sum(-1, dtype=torch.int32) > num_keep_R).any()):
        num_level_R = num_keep_R - (scores_RV > last_R1).sum(-1, dtype=torch.int32)
        level_RV = scores_RV == last_R1
        keep_RV &= ~level_RV | (level_RV.cumsum(-1, dtype=torch.int32) <= num_level_R[:, None])
    return keep_RV


class Transform(NamedTuple):
    """One step of the order: which rows ask for it, and what it does to them, given their sequences."""

    wanted: Callable[[SamplingParams], bool]
    apply: Callable[[Tensor, SequenceOf[Sequence]], Tensor]


# What rows of different settings share: a row that does not ask for a transform goes past it untouched.
ORDER = (
    Transform(lambda params: True, lambda x, seqs: temperature(x, _column("temperature", seqs, like=x))),
    Transform(lambda params: params.min_p > 0, lambda x, seqs: min_p(x, _column("min_p", seqs, like=x))),
    Transform(lambda params: params.top_k > 0, lambda x, seqs: top_k(x, _ranks("top_k", seqs, like=x))),
    Transform(lambda params: params.top_p < 1, lambda x, seqs: top_p(x, _column("top_p", seqs, like=x, dtype=torch.float64))),
)


def transform(logits_RV: Tensor, seqs: SequenceOf[Sequence]) -> Tensor:
    """Plain float32 logits, a row a sequence -> the logits that the rows' settings leave; the input is not changed."""
    for step in ORDER:
        rows = [row for row, seq in enumerate(seqs) if step.wanted(seq.request.sampling)]
        if len(rows) == len(seqs):
            logits_RV = step.apply(logits_RV, seqs)
        elif rows:
            index = torch.tensor(rows, device=logits_RV.device)
            logits_RV = logits_RV.index_copy(0, index, step.apply(logits_RV[index], [seqs[row] for row in rows]))
    return logits_RV


def _column(key: str, seqs: SequenceOf[Sequence], *, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows' settings of ``key``, [R]."""
    return torch.tensor([getattr(seq.request.sampling, key) for seq in seqs], dtype=dtype, device=like.device)


def _ranks(key: str, seqs: SequenceOf[Sequence], *, like: Tensor) -> Tensor:
    """The rows' settings of ``key``, int64 [R], cut to the vocabulary before they could be too large for a tensor."""
    return torch.tensor([min(getattr(seq.request.sampling, key), like.shape[-1]) for seq in seqs], device=like.device)

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
# Ranks to look at first for top_p: nearly always they hold the mass asked for, and sorting the whole vocabulary is slow.
_NUM_LEADING = 1024


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
    return _keep_leading(logits_RV, ranked_RN=ranked_RN, num_keep_R=top_k_R)


def top_p(logits_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities sum to at least ``top_p`` (Holtzman et al. 2020)."""
    vocab_size = logits_RV.shape[-1]
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    ranked_RN = logprobs_RV.topk(min(_NUM_LEADING, vocab_size), dim=-1).values
    num_keep_R = _num_to_reach(ranked_RN, mass_R=top_p_R)
    if bool((num_keep_R > ranked_RN.shape[-1]).any()):
        ranked_RN = logprobs_RV.sort(dim=-1, descending=True).values
        num_keep_R = _num_to_reach(ranked_RN, mass_R=top_p_R).clamp(max=vocab_size)
    keep = _keep_leading(logprobs_RV, ranked_RN=ranked_RN, num_keep_R=num_keep_R)
    return logits_RV.masked_fill(keep == -torch.inf, -torch.inf)


def _num_to_reach(ranked_logprobs_RN: Tensor, *, mass_R: Tensor) -> Tensor:
    """How many leading ranks sum to at least ``mass``; N + 1 where all of them do not."""
    mass_RN = ranked_logprobs_RN.exp().cumsum(-1, dtype=torch.float64)
    return (mass_RN < mass_R[:, None]).sum(-1) + 1


def _keep_leading(scores_RV: Tensor, *, ranked_RN: Tensor, num_keep_R: Tensor) -> Tensor:
    """-inf for all but the ``num_keep`` largest scores of each row, the lower id first among equal ones.

    ``ranked_RN`` holds at least ``num_keep`` of the row's scores in falling order.
    """
    last_R1 = ranked_RN.gather(-1, num_keep_R[:, None] - 1)
    above, level = scores_RV > last_R1, scores_RV == last_R1
    num_level_R1 = num_keep_R[:, None] - above.sum(-1, keepdim=True)
    keep = above | (level & (level.cumsum(-1, dtype=torch.int32) <= num_level_R1))
    return scores_RV.masked_fill(~keep, -torch.inf)


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

"""Changes single logits of a row before anything is drawn: what is allowed, biased, too early or said already.

Unlike the transforms these hold for greedy rows too, and read the row's own tokens; a row that asks for none costs nothing.
Shape suffixes: M rows that sample, V vocabulary, N touched ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def allowed_token_ids(logits_V: Tensor, seq: Sequence) -> None:
    """Rule out every id that is not allowed. Ids past the vocabulary allow nothing."""
    allowed = _ids(seq.request.sampling.allowed_token_ids or (), like=logits_V)
    kept_N = logits_V[allowed]
    logits_V.fill_(-torch.inf)
    logits_V[allowed] = kept_N


def bad_words(logits_V: Tensor, seq: Sequence) -> None:
    """Rule out each token that would complete a bad word, wherever in the answer it began."""
    answer = seq.tokens[seq.num_prompt :].tolist()
    banned = [word[-1] for word in seq.rules.bad_words if len(word) == 1 or tuple(answer[1 - len(word) :]) == word[:-1]]
    logits_V[_ids(banned, like=logits_V)] = -torch.inf


def min_tokens(logits_V: Tensor, seq: Sequence) -> None:
    """Rule out every token that would end the answer, while there are fewer than ``min_tokens``."""
    if seq.num_generated < seq.request.sampling.min_tokens:
        logits_V[_ids(seq.rules.end_reasons, like=logits_V)] = -torch.inf


def logit_bias(logits_V: Tensor, seq: Sequence) -> None:
    bias = {token_id: value for token_id, value in seq.request.sampling.logit_bias.items() if token_id < len(logits_V)}
    logits_V[list(bias)] += torch.tensor(list(bias.values()), device=logits_V.device)


def penalties(logits_V: Tensor, seq: Sequence) -> None:
    """repetition_penalty over prompt and answer (Keskar et al. 2019): a positive logit is divided by it, another multiplied.

    Then ``frequency_penalty`` times how often the answer has the token, and ``presence_penalty`` once if it has it, are
    taken off.
    """
    assert seq.tally is not None, "made where there are penalties"
    sampling = seq.request.sampling
    token_ids, counts = np.array(seq.tally.token_ids), np.array(seq.tally.counts)
    known = token_ids < len(logits_V)
    seen_N = torch.from_numpy(token_ids[known]).to(logits_V.device)
    counts_N = torch.from_numpy(counts[known]).to(logits_V)
    logits_N = logits_V[seen_N]
    penalised_N = torch.where(logits_N > 0, logits_N / sampling.repetition_penalty, logits_N * sampling.repetition_penalty)
    penalised_N = penalised_N.clamp(max=torch.finfo(penalised_N.dtype).max)  # a tiny penalty may go over what float32 holds
    logits_V[seen_N] = penalised_N - sampling.frequency_penalty * counts_N - sampling.presence_penalty * (counts_N > 0)


def grammar(logits_V: Tensor, seq: Sequence) -> None:
    """Rule out every token that the grammar does not allow next.

    Where the rules before this one leave none of the allowed ones, the grammar wins and those are equally likely.
    """
    assert seq.grammar is not None
    allowed_V = torch.from_numpy(seq.grammar.allowed()).to(logits_V.device)
    logits_V[~allowed_V] = -torch.inf
    if logits_V.isneginf().all():
        logits_V[allowed_V] = 0.0


class Adjustment(NamedTuple):
    """One step of the order: which rows ask for it, and what it does to a row's logits in place."""

    wanted: Callable[[SamplingParams], bool]
    apply: Callable[[Tensor, Sequence], None]


# vLLM's order.
ORDER = (
    Adjustment(lambda params: params.allowed_token_ids is not None, allowed_token_ids),
    Adjustment(lambda params: bool(params.bad_words), bad_words),
    Adjustment(lambda params: params.min_tokens > 0, min_tokens),
    Adjustment(lambda params: bool(params.logit_bias), logit_bias),
    Adjustment(lambda params: params.penalises, penalties),
)


def adjust(logits_MV: Tensor, seqs: SequenceOf[Sequence]) -> Tensor:
    """Plain float32 logits [M, V], a row a sequence -> adjusted ones; the input is not changed."""
    steps_of_rows = [_steps(seq) for seq in seqs]
    if not any(steps_of_rows):
        return logits_MV
    adjusted_MV = logits_MV.clone()
    for logits_V, seq, steps in zip(adjusted_MV, seqs, steps_of_rows, strict=True):
        for step in steps:
            step(logits_V, seq)
    return adjusted_MV


def is_adjusted(seq: Sequence) -> bool:
    """Whether ``adjust`` may change the logits of ``seq``."""
    return bool(_steps(seq))


def _steps(seq: Sequence) -> list[Callable[[Tensor, Sequence], None]]:
    """What a row asks for; the grammar comes last, since an answer must keep to it whatever else is asked."""
    steps = [step.apply for step in ORDER if step.wanted(seq.request.sampling)]
    return steps if seq.grammar is None else [*steps, grammar]


def _ids(token_ids: object, *, like: Tensor) -> Tensor:
    """Those of ``token_ids`` that the vocabulary has, int64 [N]."""
    found = np.fromiter(token_ids, dtype=np.int64)  # type: ignore[call-overload]
    return torch.from_numpy(found[found < len(like)]).to(like.device)

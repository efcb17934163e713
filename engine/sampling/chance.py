"""A token by chance from each row of logits: the transforms, then the inverse of the cumulative distribution.

Knows a row's settings and the uniform number that it is handed; where that number comes from is rng's business.
Shape suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import torch
from torch import Tensor

from engine.sampling.transforms import transform
from engine.sequence import Sequence


class Choose(Protocol):
    """Float32 logits [R, V], a row a sequence, and its uniform number in [0, 1) -> the chosen token ids, int64 [R].

    Each is the first token id whose cumulative probability, in id order, over what the sequence's settings leave, exceeds
    its number. A row that holds NaN gives any id.
    """

    def __call__(self, logits_RV: Tensor, seqs: SequenceOf[Sequence], chance_R: SequenceOf[float]) -> Tensor: ...


def choose(logits_RV: Tensor, seqs: SequenceOf[Sequence], chance_R: SequenceOf[float]) -> Tensor:
    """``Choose`` in torch, on any device; the cumulative sums are float64."""
    cumulative_RV = torch.softmax(transform(logits_RV, seqs), dim=-1).cumsum(-1, dtype=torch.float64)
    target_R1 = cumulative_RV[:, -1:] * torch.tensor(chance_R, dtype=torch.float64, device=logits_RV.device)[:, None]
    token_ids_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1)
    return token_ids_R.clamp(max=logits_RV.shape[-1] - 1)  # a row of NaN finds no place

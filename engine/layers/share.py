"""Which part of each layer a process holds where several run one model, and how their results become the whole's.

Knows neither processes nor devices: the sum over them is handed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

AllReduce = Callable[[Tensor], Tensor]


def _itself(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part ``rank`` of ``num_ranks`` equal ones, as in Megatron-LM (Shoeybi et al. 2019).

    A rank has some of the attention's heads and of the feed-forward's inner numbers: rows of the projections that lead to
    them, the matching columns of those that lead back. ``all_reduce`` gives the sum of what all ranks pass to it, on each
    of them; it may write over what it is given.
    """

    rank: int = 0
    num_ranks: int = 1
    all_reduce: AllReduce = _itself


WHOLE = Share()

"""Draws that the device makes while the host goes on: the tokens there, and everything about them here, when it is asked for.

Knows no logits and no settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.types import Draw


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The draws for M sequences.

    Attributes:
        token_ids_M: int64, the first that is drawn for each, on the device. Where a sequence draws several it goes on from none.
        read: all draws of each, in order; waits for the device.
    """

    token_ids_M: Tensor
    read: Callable[[], list[Draw]]

    @classmethod
    def joined(cls, parts: SequenceOf[Drawn]) -> Drawn:
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([part.token_ids_M for part in parts]), lambda: [draw for part in parts for draw in part.read()])

"""Token ids to vectors; knows nothing of what the ids spell."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """Row ``id`` of weight [V, E]. torch's own class would draw random numbers first, which imports half of its compiler."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size, device="meta"), requires_grad=False)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        return F.embedding(token_ids_T, self.weight)

"""A linear layer whose rows, on request, do not depend on the rows beside them, bit for bit.

Knows nothing of what it projects; parameters are allocated without storage and filled by engine.weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.share import WHOLE, AllReduce

# Matrix libraries pick another summation order for another number of rows, so a row's last bits depend on how many rows
# ran with it. Always running the same number of rows keeps the order; 16 fills the vector units of today's CPUs.
ROWS_PER_TILE = 16


class Linear(nn.Module):
    """``x @ weight.T + bias`` with weight [out_features, in_features].

    With ``batch_invariant`` the rows go through in padded tiles of ROWS_PER_TILE, one row as well as a thousand. Where the
    in_features are spread over several processes, ``all_reduce`` adds their results up; one of them has the bias, the others zeros.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, batch_invariant: bool, all_reduce: AllReduce = WHOLE.all_reduce
    ) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self.all_reduce = all_reduce
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, device="meta"), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]."""
        return self.all_reduce(self._product(x))

    def _product(self, x: Tensor) -> Tensor:
        if not self.batch_invariant:
            return F.linear(x, self.weight, self.bias)
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % ROWS_PER_TILE))
        return torch.cat([F.linear(tile, self.weight, self.bias) for tile in padded.split(ROWS_PER_TILE)])[:num_rows]

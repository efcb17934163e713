"""Root-mean-square normalisation over the last dimension; knows nothing of where it stands in the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)``, the mean in float32, the product in x's dtype (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = wide.square().mean(-1, keepdim=True)
        normed = wide * (torch.rsqrt(mean + self.eps) + (mean - mean))  # NaN, not zeros, where the squares overflow
        return self.weight * normed.to(x.dtype)

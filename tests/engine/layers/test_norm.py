"""The norm of numbers that are too large to be squared."""

from __future__ import annotations

import pytest
import torch

from engine.layers.norm import RMSNorm


@pytest.mark.parametrize("value", [1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_has_no_mean_square_is_no_number_and_harms_nobody(dtype: torch.dtype, value: float) -> None:
    norm = RMSNorm(64, eps=1e-5)
    norm.weight = torch.nn.Parameter(torch.ones(64, dtype=dtype), requires_grad=False)
    x = torch.ones(3, 64, dtype=dtype)
    x[1, 5] = value
    normed = norm(x)
    assert normed[1].isnan().all()
    torch.testing.assert_close(normed[[0, 2]], x[[0, 2]])

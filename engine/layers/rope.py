"""Rotary position embedding: the table of angles and the rotation; knows positions, not whose they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from engine.layers.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, *, head_dim: int) -> Tensor:
    """Radians per position for each of the head_dim / 2 pairs, float32 [D / 2]; formulas in RopeSpec."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / plain
        turns = rope.original_max_position / wavelength
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
        return (1 - keep) * plain / rope.factor + keep * plain
    return plain


class RotaryTable(nn.Module):
    """Cosines and sines for every position the model knows, float32 [max_position, D].

    A table and not a formula per step, because a vectorised cosine may round differently at another place in a tensor,
    and an angle must depend on its position alone.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: RopeSpec, *, head_dim: int, max_position: int) -> None:
        super().__init__()
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(rope, head_dim=head_dim)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, positions_T: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines for the step's tokens, each [T, 1, D] in ``dtype``."""
        return self.cos[positions_T, None].to(dtype), self.sin[positions_T, None].to(dtype)


def rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of every head by the token's angles (Su et al. 2021, half-split pairing)."""
    first, second = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D

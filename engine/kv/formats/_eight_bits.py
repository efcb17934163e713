"""Numbers as one-byte codes times a power of two, one for each channel, token or whole block.

Knows the rounding; a scale that is a power of two takes one byte, and a code times its scale is exact in bfloat16.
Shape suffixes as in engine/kv/formats/_quantised.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.kv.formats._quantised import Part

# Exponents go from here to there. What is no number becomes so large that its row's logits are none either.
_LEAST_EXPONENT, _MOST_EXPONENT, _NO_NUMBER = -60, 100, 118

_DIMS: dict[str, int | tuple[int, ...]] = {"channel": -2, "token": -1, "block": (-2, -1)}


@dataclass(frozen=True, slots=True)
class EightBits:
    """Codes of ``dtype`` (int8, or an 8-bit float), the largest of which is ``largest``.

    A scale is the least power of two that brings all numbers of its channel, token or block within ``largest``.
    """

    dtype: torch.dtype
    largest: float
    per: Literal["channel", "token", "block"]

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        return Part(head_dim, per_token=True), Part(head_dim if self.per == "channel" else 1, per_token=self.per == "token")

    def encode(self, x_NKBD: Tensor) -> tuple[Tensor, ...]:
        exponents, scaled_NKBD = scale(x_NKBD, dim=_DIMS[self.per], largest=self.largest)
        if not self.dtype.is_floating_point:
            scaled_NKBD = scaled_NKBD.round()
        return scaled_NKBD.to(self.dtype).view(torch.uint8), exponents

    def decode(self, parts_RC: tuple[Tensor, ...]) -> Tensor:
        codes_RD, exponents = parts_RC
        return torch.ldexp(codes_RD.view(self.dtype).float(), exponents.view(torch.int8).float())


def scale(x: Tensor, *, dim: int | tuple[int, ...], largest: float) -> tuple[Tensor, Tensor]:
    """float32 -> exponents as int8 in uint8, over ``dim``, and ``x`` / 2^exponent, which is within ``largest``."""
    most = x.abs().amax(dim, keepdim=True)
    mantissa, exponents = torch.frexp(most / largest)
    exponents = (exponents - (mantissa == 0.5).int()).clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
    is_number = most.isfinite()
    scaled = torch.ldexp(x, -exponents.float()).clamp(-largest, largest)
    exponents = torch.where(is_number, exponents, _NO_NUMBER)
    return exponents.to(torch.int8).view(torch.uint8), torch.where(is_number, scaled, largest)

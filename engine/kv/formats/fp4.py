"""Keys and values as 4-bit floats (e2m1) with a scale for each 16 of them: little over a quarter of the bytes of bfloat16.

Knows how keys are made even first: channels that are far out are divided by a power of 8, then a Hadamard rotation spreads
what is left over all channels, as in QuaRot (Ashkboos et al. 2024), so that no outlier takes the resolution from others.
Shape suffixes as in engine/kv/formats/_quantised.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv.formats._eight_bits import scale
from engine.kv.formats._quantised import Part, QuantisedFormat

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of e2m1
_BORDERS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_NUMBERS = torch.cat((_MAGNITUDES, -_MAGNITUDES))
_LARGEST = 6.0
_LARGEST_SCALE = 448.0  # of e4m3
_VALUES_PER_SCALE = 16
_LEAST_SHIFT = 2  # a channel about 23 times the middle one


@dataclass(frozen=True, slots=True)
class FourBits:
    """e2m1 codes, an e4m3 scale for each 16 channels of a token, a power of two for a block's head (as in NVFP4).

    With ``evens_out`` the channels are made even first; two bits of each say by how much it was divided.
    """

    evens_out: bool

    def parts(self, head_dim: int) -> tuple[Part, ...]:
        plain = Part(head_dim // 2, per_token=True), Part(head_dim // _group(head_dim), per_token=True), Part(1, per_token=False)
        return (*plain, Part(-(-head_dim // 4), per_token=False)) if self.evens_out else plain

    def encode(self, x_NKBD: Tensor) -> tuple[Tensor, ...]:
        shifts = None
        if self.evens_out:
            shifts = _shifts(x_NKBD)
            x_NKBD = hadamard(torch.ldexp(x_NKBD, -3.0 * shifts))
        exponents, x_NKBD = scale(x_NKBD, dim=(-2, -1), largest=_LARGEST * _LARGEST_SCALE)
        groups = x_NKBD.unflatten(-1, (-1, _group(x_NKBD.shape[-1])))
        scales = (groups.abs().amax(-1) / _LARGEST).to(torch.float8_e4m3fn)
        steps = scales.float()[..., None]
        magnitudes = torch.bucketize((groups.abs() / torch.where(steps == 0, 1.0, steps)).contiguous(), _BORDERS.to(groups.device))
        codes = (magnitudes + 8 * (groups < 0)).flatten(-2).to(torch.uint8)
        packed = codes[..., 0::2] | codes[..., 1::2] << 4, scales.view(torch.uint8), exponents
        return packed if shifts is None else (*packed, _pack_shifts(shifts))

    def decode(self, parts_RC: tuple[Tensor, ...]) -> Tensor:
        packed_RC, scales_RC, exponents_R1 = parts_RC[:3]
        codes_RD = torch.stack((packed_RC & 15, packed_RC >> 4), dim=-1).flatten(1)
        groups = _NUMBERS.to(packed_RC.device)[codes_RD.int()].unflatten(1, (scales_RC.shape[1], -1))
        x_RD = (groups * scales_RC.view(torch.float8_e4m3fn).float()[..., None]).flatten(1)
        x_RD = torch.ldexp(x_RD, exponents_R1.view(torch.int8).float())
        return torch.ldexp(hadamard(x_RD), 3.0 * _unpack_shifts(parts_RC[3], x_RD.shape[1])) if self.evens_out else x_RD


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last dimension by the normalised Hadamard matrix of its largest power of two; twice gives ``x`` again.

    Sums and differences in a fixed order, so that a row's bits do not depend on the rows beside it.
    """
    size = x.shape[-1]
    order = size & -size
    half = 1
    while half < order:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return x * order**-0.5


def _group(head_dim: int) -> int:
    return math.gcd(_VALUES_PER_SCALE, head_dim)


def _shifts(x_NKBD: Tensor) -> Tensor:
    """How many times each channel is divided by 8, [N, K, 1, D]: 0, or where it is far over the middle one 2 or 3.

    The others are left to the rotation: a channel that is large in the keys is mostly large in the queries too, and all of
    its error would stay with it.
    """
    most = x_NKBD.abs().amax(-2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    excess = ((most / most.median(-1, keepdim=True).values).log2() / 3).nan_to_num(0.0).round().clamp(0, 3)
    return torch.where(excess < _LEAST_SHIFT, 0.0, excess)


def _pack_shifts(shifts: Tensor) -> Tensor:
    """Four of two bits a byte."""
    padded = torch.nn.functional.pad(shifts, (0, -shifts.shape[-1] % 4)).to(torch.uint8).unflatten(-1, (-1, 4))
    return padded[..., 0] | padded[..., 1] << 2 | padded[..., 2] << 4 | padded[..., 3] << 6


def _unpack_shifts(packed_RC: Tensor, head_dim: int) -> Tensor:
    bits = torch.stack([packed_RC >> place & 3 for place in (0, 2, 4, 6)], dim=-1)
    return bits.flatten(1)[:, :head_dim].float()


FORMAT = QuantisedFormat(keys=FourBits(evens_out=True), values=FourBits(evens_out=False))

"""The gated feed-forward block, SiLU(gate) * up, with gate and up run as one projection; knows one token at a time."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear import Linear
from engine.layers.spec import DecoderSpec


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020): hidden [T, E] -> [T, E]."""

    def __init__(self, spec: DecoderSpec, *, batch_invariant: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=False, batch_invariant=batch_invariant)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size, bias=False, batch_invariant=batch_invariant)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden_TE).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

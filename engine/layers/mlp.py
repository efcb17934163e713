"""The gated feed-forward block, SiLU(gate) * up, with gate and up run as one projection; knows one token at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear import Linear
from engine.layers.share import AllReduce
from engine.layers.spec import DecoderSpec

# torch computes an elementwise function on one thread below this many numbers (its GRAIN_SIZE).
_ONE_THREAD = 32768


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020): hidden [T, E] -> [T, E]; ``all_reduce`` is over the ranks that share the inner numbers."""

    def __init__(self, spec: DecoderSpec, *, batch_invariant: bool, all_reduce: AllReduce) -> None:
        super().__init__()
        self.rows_per_piece = max(1, (_ONE_THREAD - 1) // spec.intermediate_size) if batch_invariant else None
        self.gate_up_proj = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=False, batch_invariant=batch_invariant)
        self.down_proj = Linear(
            spec.intermediate_size, spec.hidden_size, bias=False, batch_invariant=batch_invariant, all_reduce=all_reduce
        )

    def forward(self, hidden_TE: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden_TE).chunk(2, dim=-1)
        return self.down_proj(self._silu(gate) * up)

    def _silu(self, gate: Tensor) -> Tensor:
        # The numbers that do not fill a vector unit at the end of a thread's share go through another exponential, which
        # rounds differently. On one thread, and with gate a view whose rows do not adjoin, each share is one whole row.
        if self.rows_per_piece is None:
            return F.silu(gate)
        return torch.cat([F.silu(piece) for piece in gate.split(self.rows_per_piece)])

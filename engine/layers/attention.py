"""Self-attention around the part that needs the cache: projections, head norms and rotation are here.

Knows no blocks and no sequences: who a token may look at is the business of the ``Attend`` that is handed in.
Shape suffixes: T tokens of the step, E hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import rotate
from engine.layers.share import AllReduce
from engine.layers.spec import DecoderSpec


class Attend(Protocol):
    """Stores the step's keys and values for ``layer`` and lets every query look at its own sequence up to itself.

    Takes q [T, H, D], k and v [T, K, D], normed and rotated already; gives [T, H, D] in q's dtype. The softmax runs
    over ``spec.attention_scale * q @ k``.
    """

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor: ...


class SelfAttention(nn.Module):
    """Grouped-query attention with the three input projections run as one; ``all_reduce`` is over the ranks that share the heads."""

    def __init__(self, spec: DecoderSpec, *, layer: int, batch_invariant: bool, all_reduce: AllReduce) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        self.head_counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q_size, qkv_size = spec.num_heads * spec.head_dim, sum(self.head_counts) * spec.head_dim
        self.qkv_proj = Linear(spec.hidden_size, qkv_size, bias=spec.qkv_bias, batch_invariant=batch_invariant)
        self.o_proj = Linear(q_size, spec.hidden_size, bias=spec.o_bias, batch_invariant=batch_invariant, all_reduce=all_reduce)
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps) if spec.qk_norm else None

    def forward(self, hidden_TE: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        heads_TND = self.qkv_proj(hidden_TE).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TKD, v_TKD = heads_TND.split(self.head_counts, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        o_THD = attend(self.layer, rotate(q_THD, *cos_sin), rotate(k_TKD, *cos_sin), v_TKD)
        return self.o_proj(o_THD.flatten(1))

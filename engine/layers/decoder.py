"""The one decoder that all served families share: token ids in, hidden states and logits out, flat over tokens.

Knows no batch, no phase and no cache: a token is an id and a position, and ``attend`` knows the rest.
Shape suffixes: T tokens of the step, M rows that sample, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.attention import Attend, SelfAttention
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rope import RotaryTable
from engine.layers.share import WHOLE, AllReduce, Share
from engine.layers.spec import DecoderSpec, RopeSpec

__all__ = ["Decoder", "DecoderLayer", "DecoderSpec", "RopeSpec"]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, spec: DecoderSpec, *, layer: int, batch_invariant: bool, all_reduce: AllReduce) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = SelfAttention(spec, layer=layer, batch_invariant=batch_invariant, all_reduce=all_reduce)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = GatedMLP(spec, batch_invariant=batch_invariant, all_reduce=all_reduce)

    def forward(self, hidden_TE: Tensor, cos_sin: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        hidden_TE = hidden_TE + self.self_attn(self.input_layernorm(hidden_TE), cos_sin, attend)
        return hidden_TE + self.mlp(self.post_attention_layernorm(hidden_TE))


class Decoder(nn.Module):
    """Parameters are named as in Hugging Face checkpoints, less the leading ``model.`` and with q/k/v and gate/up fused.

    They hold no storage until engine.weights assigns them. With ``batch_invariant`` a token's numbers depend on its own
    sequence alone, bit for bit, if ``attend`` keeps that promise too. Where the model is shared, ``spec`` is the whole
    model's and ``self.spec`` what this rank has of it.
    """

    def __init__(self, spec: DecoderSpec, *, batch_invariant: bool = False, share: Share = WHOLE) -> None:
        super().__init__()
        self.spec = spec = spec.share(share.num_ranks)
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer=i, batch_invariant=batch_invariant, all_reduce=share.all_reduce) for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.rotary = RotaryTable(spec.rope, head_dim=spec.head_dim, max_position=spec.max_position_embeddings)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, bias=False, batch_invariant=batch_invariant)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @torch.inference_mode()
    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """ids and positions, int [T] -> hidden states [T, E], the final norm applied."""
        hidden_TE = self.embed_tokens(token_ids_T)
        cos_sin = self.rotary(positions_T, dtype=hidden_TE.dtype)
        for layer in self.layers:
            hidden_TE = layer(hidden_TE, cos_sin, attend)
        return self.norm(hidden_TE)

    @torch.inference_mode()
    def logits(self, hidden_ME: Tensor) -> Tensor:
        """Hidden states of the rows that sample, [M, E] -> float32 [M, V]."""
        return self.lm_head(hidden_ME).float()

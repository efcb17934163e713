"""The step on a GPU with this project's Triton kernels between the matrix products, over a plain cache.

Knows how the decoder's layers follow one another when what lies between their projections is fused: each norm takes in the
addition before it, and the rotation writes keys and values to their slots. Suffixes as in engine/layers/decoder.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.kernels.triton.elementwise import add_rms_norm, rms_norm, rotate_and_store, silu_and_mul
from engine.kv.format import Filling
from engine.kv.formats._plain import PlainLayer
from engine.kv.store import KVStore
from engine.layers.attention import SelfAttention
from engine.layers.decoder import Decoder
from engine.runner.forward import TorchForward


class FusedForward(TorchForward):
    """Implements ``engine.runner.forward.Forward`` over any attention backend that reads a plain cache."""

    def __init__(self, model: Decoder, *, store: KVStore, backend: AttentionBackend[Any]) -> None:
        super().__init__(model, store=store, backend=backend)
        layers = [store.layer(index) for index in range(model.spec.num_layers)]
        self.pools = [layer for layer in layers if isinstance(layer, PlainLayer)]
        assert len(self.pools) == len(layers), "the store was allocated with a plain format"
        self.head_norms = [_head_norms(layer.self_attn) for layer in model.layers]
        # Each layer's second half is followed by the next one's first norm, the last by the final norm.
        self.norms_after = [*(layer.input_layernorm for layer in model.layers[1:]), model.norm]

    @torch.inference_mode()
    def states(self, token_ids_T: Tensor, positions_T: Tensor, slots_T: Tensor, attention: Any, filling: Filling | None = None) -> Tensor:
        assert filling is None, "the cache is plain"
        model, eps = self.model, self.model.spec.rms_norm_eps
        stream_TE = model.embed_tokens(token_ids_T)
        normed_TE = rms_norm(stream_TE, model.layers[0].input_layernorm.weight, eps=eps)
        for layer, pool, head_norms, norm_after in zip(model.layers, self.pools, self.head_norms, self.norms_after, strict=True):
            q_THD = rotate_and_store(
                layer.self_attn.qkv_proj(normed_TE),
                pool.keys,
                pool.values,
                slots_T=slots_T,
                positions_T=positions_T,
                cos_PD=model.rotary.cos,
                sin_PD=model.rotary.sin,
                num_heads=model.spec.num_heads,
                norms_2D=head_norms,
                eps=eps,
            )
            o_THD = self.backend.attend(q_THD, pool, attention)
            attended_TE = layer.self_attn.o_proj(o_THD.flatten(1))
            normed_TE, stream_TE = add_rms_norm(attended_TE, stream_TE, layer.post_attention_layernorm.weight, eps=eps)
            fed_TE = layer.mlp.down_proj(silu_and_mul(layer.mlp.gate_up_proj(normed_TE)))
            normed_TE, stream_TE = add_rms_norm(fed_TE, stream_TE, norm_after.weight, eps=eps)
        return normed_TE


def _head_norms(attention: SelfAttention) -> Tensor | None:
    """The weights of the norms on queries and keys, [2, D]; None: the family has none."""
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return torch.stack((attention.q_norm.weight, attention.k_norm.weight))

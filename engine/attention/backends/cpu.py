"""Attention by this project's own CPU kernels, in bfloat16: what sequences share is read once, and rows keep their bits.

Knows when the kernels can serve; how they do it is engine/kernels/cpu/attention.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.backend import AttentionInputs, AttentionSpec
from engine.kernels.cpu import build
from engine.kernels.cpu.attention import CODES, LANES, MAX_HEAD_DIM, TOKENS_PER_GROUP, KVLayout, PagedAttention
from engine.kv.format import KVFormat, KVLayer
from engine.kv.packed import PackedFormat, PackedLayer
from engine.kv.packed_codes import PackedCodesFormat, PackedCodesLayer


def refuse(spec: AttentionSpec) -> str | None:
    if spec.device.type != "cpu":
        return f"the kernels run on the CPU, not on {spec.device.type}"
    if spec.num_ranks > 1:
        return f"the kernels run whole steps in one process, and engine.tensor_parallel={spec.num_ranks} processes share each layer"
    if spec.dtype != torch.bfloat16:
        return f"the kernels compute in bfloat16 and the model in {str(spec.dtype).removeprefix('torch.')}; use model.dtype=bfloat16"
    if spec.kv_format not in (known := ("bf16", *CODES)):
        return f"the kernels read keys and values in {', '.join(known)}, not in {spec.kv_format}; use kv_cache.format=bf16"
    if spec.head_dim % LANES != 0 or spec.head_dim > MAX_HEAD_DIM:
        return f"the kernels take head sizes that are multiples of {LANES} up to {MAX_HEAD_DIM}, and this model's is {spec.head_dim}"
    if spec.block_size % TOKENS_PER_GROUP != 0:
        return f"the kernels take blocks of a multiple of {TOKENS_PER_GROUP} tokens, and kv_cache.block_size is {spec.block_size}"
    if (reason := spec.refuse_masks()) is not None:
        return reason
    try:
        build.load()
    except build.Unavailable as reason:
        return str(reason)
    return None


class Backend:
    """A plan is a PagedAttention of its own, so that steps may be planned ahead."""

    def __init__(self, spec: AttentionSpec, *, tier: build.Tier | None = None) -> None:
        self.spec = spec
        self.library = build.load(tier)
        self.layout = KVLayout(spec.num_kv_heads, spec.head_dim, spec.block_size, CODES.get(spec.kv_format, 0))
        is_plain = spec.kv_format == "bf16"
        self.kv_format: KVFormat = PackedFormat(self.library) if is_plain else PackedCodesFormat(self.library, spec.kv_format)

    def plan(self, inputs: AttentionInputs) -> PagedAttention:
        spec = self.spec
        attention = PagedAttention(
            self.library, layout=self.layout, num_heads=spec.num_heads, scale=spec.scale, num_threads=spec.num_threads
        )
        attention.plan(query_starts=inputs.query_starts, kv_lengths=inputs.kv_lengths, block_tables=inputs.block_tables)
        return attention

    def attend(self, q_THD: Tensor, kv: KVLayer, plan: PagedAttention, *, window: int | None = None) -> Tensor:
        assert window is None, "refused"
        assert isinstance(kv, PackedLayer | PackedCodesLayer), "the store was allocated with this backend's kv_format"
        return plan.attend(q_THD, kv.pointers)

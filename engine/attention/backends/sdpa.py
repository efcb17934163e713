"""Attention with torch's own operators, on any device: few large products in place of many small ones.

Knows no fixed order of summation, so a row's last bits may depend on the rows beside it.

A chunk of several tokens runs torch's scaled_dot_product_attention over its sequence's gathered keys and values. Decodes
run in groups of like context length, padded to the longest. Decodes that start with the same blocks (a system prompt)
read those once: all their queries meet the shared keys in one product, and each its own keys in another, under one softmax.
Shape suffixes: T tokens of the step, G rows of a group, n tokens of a chunk, L slots, H query heads, K key/value heads,
J = H / K query heads a key/value head, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.backend import AttentionInputs, AttentionSpec
from engine.attention.prefix import Ints, shared_prefixes
from engine.kv.format import KVLayer, load_format

# Reading a prefix once is worth its own products when it saves this many tokens' keys and values.
_MIN_SAVED_TOKENS = 256
# Padding that a group of decodes may gather: reading these slots costs about what one more group costs.
_MAX_PADDING_SLOTS = 512
# A group of several decodes gathers at most this many slots: few enough for a core's cache to still hold them when read.
_MAX_GROUP_SLOTS = 4096


def refuse(spec: AttentionSpec) -> str | None:
    if spec.batch_invariant:
        remedy = "use engine.attention=reference, or cpu with model.dtype=bfloat16"
        return f"engine.batch_invariant=true needs results that do not depend on the batch; {remedy}"
    return spec.refuse_masks()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Tokens ``rows`` of the step, one sequence's, over its slots [1, L]; bias [J x n, L] is -inf at what they do not see."""

    rows: slice
    slots_1L: Tensor
    bias_ML: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Tokens ``rows_G`` of the step, each over ``shared_1L`` (may be empty) and its own slots; bias [G, 1, 1, L] hides padding."""

    rows_G: Tensor
    shared_1L: Tensor
    own_GL: Tensor
    bias_GL: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SdpaPlan:
    """Every token of the step is in exactly one of these."""

    chunks: list[ChunkPlan]
    decodes: list[DecodePlan]


class Backend:
    """Gathers from the paged store, then multiplies; see the module's text."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.kv_format = load_format(spec.kv_format)

    def plan(self, inputs: AttentionInputs) -> SdpaPlan:
        runs = _runs(inputs)
        decodes = [run for run in runs if inputs.query_starts[run.stop] - inputs.query_starts[run.start] == 1]
        groups = [
            (part, num_shared)
            for seqs, num_shared in shared_prefixes(
                inputs, np.array([run.start for run in decodes], dtype=np.int64), min_saved_tokens=_MIN_SAVED_TOKENS
            )
            for part in _by_length(seqs, inputs.kv_lengths[seqs] - num_shared)
        ]
        return SdpaPlan(
            chunks=[self._plan_chunk(inputs, run) for run in runs if run not in decodes],
            decodes=[self._plan_decodes(inputs, seqs, num_shared) for seqs, num_shared in groups],
        )

    def attend(self, q_THD: Tensor, kv: KVLayer, plan: SdpaPlan, *, window: int | None = None) -> Tensor:
        assert window is None, "refused"
        o_THD = torch.empty_like(q_THD)
        for chunk in plan.chunks:
            o_THD[chunk.rows] = self._attend_chunk(q_THD[chunk.rows], kv, chunk)
        for group in plan.decodes:
            o_THD[group.rows_G] = self._attend_decodes(q_THD[group.rows_G], kv, group)
        return o_THD

    def _plan_chunk(self, inputs: AttentionInputs, run: range) -> ChunkPlan:
        """The last sequence's blocks but its own, which the others begin with, then each one's own block."""
        lengths, num_queries = inputs.kv_lengths[run.start : run.stop], np.diff(inputs.query_starts[run.start : run.stop + 1])
        own_starts = (lengths - 1) // inputs.block_size * inputs.block_size
        before = np.arange(own_starts[-1])
        own_sizes = lengths - own_starts
        index_O = np.repeat(np.arange(len(run)), own_sizes)
        position_O = np.arange(len(index_O)) + np.repeat(lengths - np.cumsum(own_sizes), own_sizes)
        index_n = np.repeat(np.arange(len(run)), num_queries)
        position_n = np.arange(len(index_n)) + np.repeat(lengths - np.cumsum(num_queries), num_queries)
        hidden_before = before > np.minimum(position_n, own_starts[index_n] - 1)[:, None]
        hidden_own = (index_O != index_n[:, None]) | (position_O > position_n[:, None])
        hidden_nL = np.concatenate((hidden_before, hidden_own), axis=1)
        slots = np.concatenate((inputs.slots(np.array(run.stop - 1), before), inputs.slots(run.start + index_O, position_O)))
        return ChunkPlan(
            rows=slice(int(inputs.query_starts[run.start]), int(inputs.query_starts[run.stop])),
            slots_1L=self._to_device(slots[None]),
            bias_ML=self._bias(hidden_nL).repeat(self.spec.queries_per_kv, 1),
        )

    def _plan_decodes(self, inputs: AttentionInputs, seqs: Ints, num_shared: int) -> DecodePlan:
        lengths_G1 = inputs.kv_lengths[seqs, None]
        positions_1L = np.arange(num_shared, lengths_G1.max())[None]
        # A padded position stands for the sequence's last one: a slot that is written, hidden by the bias.
        return DecodePlan(
            rows_G=self._to_device(inputs.query_starts[seqs]),
            shared_1L=self._to_device(inputs.slots(seqs[:1, None], np.arange(num_shared)[None])),
            own_GL=self._to_device(inputs.slots(seqs[:, None], np.minimum(positions_1L, lengths_G1 - 1))),
            bias_GL=self._bias(positions_1L >= lengths_G1)[:, None, None],
        )

    def _attend_chunk(self, q_nHD: Tensor, kv: KVLayer, chunk: ChunkPlan) -> Tensor:
        k_1KLD, v_1KLD = self._gather(kv, chunk.slots_1L)
        q_KJnD = q_nHD.permute(1, 0, 2).unflatten(0, (self.spec.num_kv_heads, -1))
        o_1KMD = F.scaled_dot_product_attention(q_KJnD.flatten(1, 2)[None], k_1KLD, v_1KLD, attn_mask=chunk.bias_ML, scale=self.spec.scale)
        return o_1KMD.view(q_KJnD.shape).flatten(0, 1).permute(1, 0, 2)

    def _attend_decodes(self, q_GHD: Tensor, kv: KVLayer, group: DecodePlan) -> Tensor:
        q_GKJD = (q_GHD * self.spec.scale).unflatten(1, (self.spec.num_kv_heads, -1))
        num_shared = group.shared_1L.shape[1]
        k_GKLD, v_GKLD = self._gather(kv, group.own_GL)
        scores_GKJL = q_GKJD @ k_GKLD.transpose(-1, -2) + group.bias_GL
        if num_shared == 0:
            return (scores_GKJL.softmax(-1) @ v_GKLD).flatten(1, 2)

        k_1KLD, v_1KLD = self._gather(kv, group.shared_1L)
        shared_GKJL = _for_all_rows(q_GKJD, k_1KLD[0].transpose(-1, -2))
        weights_GKJL = torch.cat((shared_GKJL, scores_GKJL), dim=-1).softmax(-1)
        shared_GKJL, own_GKJL = weights_GKJL.split([num_shared, group.own_GL.shape[1]], dim=-1)
        return (_for_all_rows(shared_GKJL, v_1KLD[0]) + own_GKJL @ v_GKLD).flatten(1, 2)

    def _gather(self, kv: KVLayer, slots_GL: Tensor) -> tuple[Tensor, Tensor]:
        k, v = kv.gather(slots_GL)
        return k.to(self.spec.dtype), v.to(self.spec.dtype)

    def _bias(self, hidden: npt.NDArray[np.bool_]) -> Tensor:
        return self._to_device(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(self.spec.dtype)

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.spec.device)


def _runs(inputs: AttentionInputs) -> list[range]:
    """Neighbours that can be read as one: each goes on where the one before it filled a block, behind the same blocks.

    So are the pieces of a chunk where blocks are quantised; else nearly every sequence is on its own.
    """
    starts = inputs.kv_lengths - np.diff(inputs.query_starts)
    runs = [range(1)]
    for seq in range(1, len(starts)):
        length = int(starts[seq])
        num_blocks = length // inputs.block_size - 1
        goes_on = length % inputs.block_size == 0 and length == inputs.kv_lengths[seq - 1] and num_blocks >= 0
        if goes_on and np.array_equal(inputs.block_tables[seq, :num_blocks], inputs.block_tables[seq - 1, :num_blocks]):
            runs[-1] = range(runs[-1].start, seq + 1)
        else:
            runs.append(range(seq, seq + 1))
    return runs


def _for_all_rows(x_GKJA: Tensor, y_KAB: Tensor) -> Tensor:
    """Multiply every row of the group with one shared matrix a head: [G, K, J, A] x [K, A, B] -> [G, K, J, B]."""
    x_KMA = x_GKJA.transpose(0, 1).flatten(1, 2)
    return (x_KMA @ y_KAB).unflatten(1, (x_GKJA.shape[0], -1)).transpose(0, 1)


def _by_length(seqs: Ints, lengths: Ints) -> list[Ints]:
    """Split a group, longest first, wherever the next row would bring too much padding or make the group too large."""
    parts: list[list[int]] = []
    longest = padding = 0
    for index in np.argsort(-lengths, kind="stable"):
        padding += longest - lengths[index]
        if not parts or padding > _MAX_PADDING_SLOTS or (len(parts[-1]) + 1) * longest > _MAX_GROUP_SLOTS:
            parts.append([])
            longest, padding = lengths[index], 0
        parts[-1].append(int(index))
    return [seqs[part] for part in parts]

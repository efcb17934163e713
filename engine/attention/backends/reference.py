"""The oracle: attention in float32 whose rows do not depend, bit for bit, on anything but their own sequence.

Knows neither which tokens share a step nor how the cache is cut into blocks: every number comes from matrix products of
one fixed shape, in an order that the position alone decides.

Queries are cut into tiles of QUERY_TILE positions, keys and values into tiles of KV_TILE positions, both counted from
position 0, so a token always sits in the same row of its tile, however its prompt was cut into chunks. A query tile
walks over the KV tiles from the first to its own and carries maximum, sum and weighted values along (online softmax,
Milakov and Gimelshein 2018; as in FlashAttention, Dao et al. 2022). Rows of a tile that are not in the step are zero
queries, which cost time and touch nobody.
Shape suffixes: T tokens of the step, G query tiles, Q = QUERY_TILE, L = KV_TILE, H query heads, K key/value heads,
D head size, B = G x K matrix products a KV tile, R = Q x H / K rows in each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.backend import AttentionInputs, AttentionSpec
from engine.kv.format import KVLayer, load_format

QUERY_TILE = 8
KV_TILE = 64

# The score of a position that a window has passed: so low that it weighs 0 beside any other, and finite, so that a row that
# sees nothing of a tile stays a number. What such a row takes in weighs 0 from its first visible position on.
_PASSED = -1e30


def refuse(spec: AttentionSpec) -> str | None:
    """It serves every dtype, format, head size and mask, on any device."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePlan:
    """Query tiles sorted by the number of KV tiles that they see, most first, so each KV tile serves the leading ones.

    Attributes:
        rows_T: the row of each token among the G x Q rows of all query tiles.
        num_tiles: G.
        slots: per KV tile, the slots [g, L] of the g query tiles that see it.
        causal_GQL: 0 where a query may look at a position of the last KV tile it sees, else -inf.
        positions_GQ: the position of each row of a query tile.
    """

    rows_T: Tensor
    num_tiles: int
    slots: list[Tensor]
    causal_GQL: Tensor
    positions_GQ: Tensor


class Backend:
    """Online softmax over fixed tiles; see the module's text for why its results are the same in every company."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.kv_format = load_format(spec.kv_format)

    def plan(self, inputs: AttentionInputs) -> ReferencePlan:
        num_queries = np.diff(inputs.query_starts)
        seq_T = np.repeat(np.arange(len(num_queries)), num_queries)
        position_T = np.arange(len(seq_T)) + np.repeat(inputs.kv_lengths - inputs.query_starts[1:], num_queries)

        # Tiles are told apart by (sequence, first position) and ordered by first position, the longest walk first.
        pairs_2T = np.stack((-(position_T // QUERY_TILE), seq_T))
        tiles_2G, tile_T = np.unique(pairs_2T, axis=1, return_inverse=True)
        first_G, seq_G = -tiles_2G[0] * QUERY_TILE, tiles_2G[1]
        tile_T = tile_T.reshape(-1)

        causal_QL = np.arange(KV_TILE) <= (first_G[:, None] % KV_TILE + np.arange(QUERY_TILE))[:, :, None]
        return ReferencePlan(
            rows_T=self._to_device(tile_T * QUERY_TILE + position_T % QUERY_TILE),
            num_tiles=len(seq_G),
            slots=[self._to_device(slots) for slots in _slots_by_kv_tile(inputs, seq_G=seq_G, first_G=first_G)],
            causal_GQL=self._to_device(np.where(causal_QL, np.float32(0), np.float32(-np.inf))),
            positions_GQ=self._to_device(first_G[:, None] + np.arange(QUERY_TILE)),
        )

    def attend(self, q_THD: Tensor, kv: KVLayer, plan: ReferencePlan, *, window: int | None = None) -> Tensor:
        q_BRD = self._to_tiles(q_THD, plan)
        group = self.spec.queries_per_kv
        num_products, num_rows, _ = q_BRD.shape
        max_BR = q_BRD.new_full((num_products, num_rows, 1), -torch.inf)
        sum_BR = q_BRD.new_zeros((num_products, num_rows, 1))
        acc_BRD = torch.zeros_like(q_BRD)
        for index, slots_gL in enumerate(plan.slots):
            num_tiles = slots_gL.shape[0]
            num_going_on = plan.slots[index + 1].shape[0] if index + 1 < len(plan.slots) else 0
            active = slice(0, num_tiles * self.spec.num_kv_heads)
            k_BLD, v_BLD = (part.flatten(0, 1).float() for part in kv.gather(slots_gL))

            scores_BRL = torch.bmm(q_BRD[active], k_BLD.transpose(1, 2))
            if self.spec.soft_cap is not None:
                scores_BRL.div_(self.spec.soft_cap).tanh_().mul_(self.spec.soft_cap)
            if window is not None:
                passed_GQL = (
                    torch.arange(index * KV_TILE, (index + 1) * KV_TILE, device=q_THD.device) <= plan.positions_GQ[..., None] - window
                )
                tiles_GKJQL = scores_BRL.view(num_tiles, -1, group, QUERY_TILE, KV_TILE)
                tiles_GKJQL.masked_fill_(passed_GQL[:num_tiles, None, None], _PASSED)
            ending = scores_BRL.view(num_tiles, -1, group, QUERY_TILE, KV_TILE)[num_going_on:]
            ending += plan.causal_GQL[num_going_on:num_tiles, None, None]

            new_max_BR = torch.maximum(max_BR[active], scores_BRL.amax(-1, keepdim=True))
            decay_BR = torch.exp(max_BR[active] - new_max_BR)
            weights_BRL = scores_BRL.sub_(new_max_BR).exp_()
            max_BR[active] = new_max_BR
            sum_BR[active] = sum_BR[active] * decay_BR + weights_BRL.sum(-1, keepdim=True)
            acc_BRD[active] = acc_BRD[active] * decay_BR + torch.bmm(weights_BRL, v_BLD)
        return self._from_tiles(acc_BRD / sum_BR, plan).to(q_THD.dtype)

    def _to_tiles(self, q_THD: Tensor, plan: ReferencePlan) -> Tensor:
        """Scaled float32 queries in the rows of their tiles, [G x K, R, D]; the rows nobody has are zero."""
        q_MHD = q_THD.new_zeros((plan.num_tiles * QUERY_TILE, *q_THD.shape[1:]), dtype=torch.float32)
        q_MHD[plan.rows_T] = q_THD.float() * self.spec.scale
        q_GQKJD = q_MHD.view(plan.num_tiles, QUERY_TILE, self.spec.num_kv_heads, self.spec.queries_per_kv, self.spec.head_dim)
        return q_GQKJD.permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1).contiguous()

    def _from_tiles(self, o_BRD: Tensor, plan: ReferencePlan) -> Tensor:
        o_GKJQD = o_BRD.view(plan.num_tiles, self.spec.num_kv_heads, self.spec.queries_per_kv, QUERY_TILE, self.spec.head_dim)
        return o_GKJQD.permute(0, 3, 1, 2, 4).reshape(-1, self.spec.num_heads, self.spec.head_dim)[plan.rows_T]

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.spec.device)


def _slots_by_kv_tile(
    inputs: AttentionInputs, *, seq_G: npt.NDArray[np.int64], first_G: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """Per KV tile t, the slots of its positions for the leading query tiles that see it, int64 [g, L].

    Positions past a sequence's end stand for its last one: a slot that is written, behind the causal mask.
    """
    last_G = inputs.kv_lengths[seq_G] - 1
    result = []
    for index in range(int(first_G[0]) // KV_TILE + 1):
        num_active = int((first_G >= index * KV_TILE).sum())
        positions_GL = np.minimum(index * KV_TILE + np.arange(KV_TILE), last_G[:num_active, None])
        result.append(inputs.slots(seq_G[:num_active, None], positions_GL))
    return result

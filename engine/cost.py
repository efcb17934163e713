"""What a step must cost: the operations of its products, and the bytes that must come out of memory.

Arithmetic on a plan's numbers; knows no machine and measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.types import StepPlan


class StepCost(NamedTuple):
    """``flops``: multiplications and additions, each counted as one. ``read_bytes``: weights, keys and values."""

    flops: int
    read_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """One model on one engine.

    Attributes:
        num_token_weights: numbers in the matrices that each token is multiplied with.
        num_row_weights: numbers in those for rows whose logits are wanted alone: what follows the last layer's attention, and the
            output head.
        bytes_per_weight: as they are held, 1 with 8-bit weights.
        kv_bytes_per_token: a position's keys and values over all layers.
    """

    num_token_weights: int
    num_row_weights: int
    num_layers: int
    num_heads: int
    head_dim: int
    bytes_per_weight: float
    kv_bytes_per_token: float
    block_size: int

    def of(self, plan: StepPlan) -> StepCost:
        """What ``plan`` must cost; element-wise work, and what is written, is left out.

        Operations, as in Chowdhery et al. 2022 (PaLM), appendix B, forward pass: 2 for each weight that a token, or a row whose
        logits are wanted, is multiplied with, and ``4 x layers x heads x head_dim`` for each token and position that it looks
        at. Bytes: all weights that are needed, and every position that a token looks at, once a step however many
        sequences share its block.
        """
        num_tokens = num_rows = num_pairs = num_open = 0
        full_blocks: set[int] = set()
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            num_tokens += chunk.num_tokens
            num_rows += chunk.samples + len(chunk.scores)
            num_pairs += chunk.num_tokens * chunk.start + chunk.num_tokens * (chunk.num_tokens + 1) // 2
            num_full, num_left = divmod(end, self.block_size)
            full_blocks.update(chunk.seq.blocks[:num_full])
            num_open += num_left
        num_read_weights = self.num_token_weights + (self.num_row_weights if num_rows else 0)
        return StepCost(
            flops=2 * (self.num_token_weights * num_tokens + self.num_row_weights * num_rows)
            + 4 * self.num_layers * self.num_heads * self.head_dim * num_pairs,
            read_bytes=self.bytes_per_weight * num_read_weights + self.kv_bytes_per_token * (len(full_blocks) * self.block_size + num_open),
        )

"""Runs steps of decodes alone in a few fixed sizes, each recorded once and replayed.

Knows sizes and the tensors that a recorded step reads; what is computed is the forward's that it wraps, and the steps that
hold more than decodes go to that as they are. Rows without a sequence are decodes of a block that is nobody's; their results
are never read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.backend import FixedPlans
from engine.runner.batch import Batch
from engine.runner.cudagraph import Compute, Graphs
from engine.runner.forward import TorchForward
from engine.sampling.drawn import Drawn
from engine.transfer import Packed


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and ``max_num_seqs``: at most as many rows are without a sequence as have one."""
    return (*(1 << power for power in range((max_num_seqs - 1).bit_length())), max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """A recorded step; ``tokens`` (ids, positions, slots, int64) and ``plan`` are what it reads."""

    tokens: list[Tensor]
    plan: Any
    replay: Compute


class BucketedForward:
    """Implements ``engine.runner.forward.Forward`` around ``forward``, whose backend offers fixed plans.

    Args:
        sizes: rows of the recorded steps, rising.
        spare_block: a block of the store that no sequence ever has.
        max_blocks: most blocks of a sequence.
    """

    def __init__(self, forward: TorchForward, *, sizes: SequenceOf[int], spare_block: int, max_blocks: int, graphs: Graphs) -> None:
        assert isinstance(forward.backend, FixedPlans)
        self.forward = forward
        self.sizes = sizes
        self.backend: FixedPlans[Any] = forward.backend
        self._spare_block = spare_block
        self._max_blocks = max_blocks
        self._graphs = graphs
        self._buckets: dict[int, _Bucket] = {}

    def hidden(self, batch: Batch) -> Tensor:
        num_rows = len(batch.token_ids_T)
        if not batch.attention.only_decodes or batch.filling is not None or num_rows > self.sizes[-1]:
            return self.forward.hidden(batch)
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        bucket = self._buckets.get(size) or self._record(size, like=batch)
        self._fill(bucket.tokens, bucket.plan, batch)
        return bucket.replay()[batch.wanted_rows_W]

    def logits(self, hidden_ME: Tensor) -> Tensor:
        return self.forward.logits(hidden_ME)

    def greedy(self, hidden_ME: Tensor, *, num_valid_tokens: int) -> Drawn:
        return self.forward.greedy(hidden_ME, num_valid_tokens=num_valid_tokens)

    def _record(self, size: int, *, like: Batch) -> _Bucket:
        """To record is to compute, which is done for ``like``."""
        tokens = Packed([(size,)] * 3, dtype=torch.int64, device=like.token_ids_T.device).tensors
        plan = self.backend.fixed_plan(num_seqs=size, num_blocks=self._max_blocks)
        self._fill(tokens, plan, like)
        token_ids_T, positions_T, slots_T = tokens
        replay = self._graphs.record(lambda: self.forward.states(token_ids_T, positions_T, slots_T, plan))
        self._buckets[size] = _Bucket(tokens=tokens, plan=plan, replay=replay)
        return self._buckets[size]

    def _fill(self, tokens: list[Tensor], plan: Any, batch: Batch) -> None:
        num_rows, size = len(batch.token_ids_T), len(tokens[0])
        of_step, spare_slot = (batch.token_ids_T, batch.positions_T, batch.slots_T), self._spare_block * batch.attention.block_size
        for fixed_T, step_T, padding in zip(tokens, of_step, (0, 0, spare_slot), strict=True):
            fixed_T[:num_rows].copy_(step_T)
            fixed_T[num_rows:].fill_(padding)
        self.backend.refill(plan, batch.attention.padded(size, block=self._spare_block))

"""Runs one step on the device: the plan's tensors, the model over them, the draws.

Knows the order of these and nothing of what is inside: what to compute is the scheduler's decision, how the model, the
attention, the cache and the sampler do it is theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.runner.batch import Batch, build_batch
from engine.sampling.sampler import Sampler
from engine.stats import Stats
from engine.types import Draw, StepPlan


class ModelRunner:
    """The engine's device: implements ``engine.loop.Runner`` with a real model."""

    def __init__(
        self,
        model: Decoder,
        *,
        store: KVStore,
        backend: AttentionBackend[Any],
        sampler: Sampler,
        stats: Stats,
        device: torch.device,
    ) -> None:
        self.model = model
        self.store = store
        self.backend = backend
        self.sampler = sampler
        self.stats = stats
        self.device = device

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Draw]:
        """Copy the plan's blocks, compute its chunks, draw for those that sample, in plan order (see Sampler.draw)."""
        with self.stats.time("forward"):
            self.store.copy_blocks(plan.copies)
            batch = build_batch(plan, block_size=self.store.block_size, device=self.device)
            hidden_TE = self._forward(batch)
            if len(batch.sampling_rows_M) == 0:
                return []
            logits_MV = self.model.logits(hidden_TE[batch.sampling_rows_M])
        with self.stats.time("sample"):
            return self.sampler.draw(logits_MV, [chunk.seq for chunk in plan.sampling])

    def _forward(self, batch: Batch) -> Tensor:
        attention = self.backend.plan(batch.attention)

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            self.store.write(layer, k_TKD, v_TKD, batch.slots_T)
            return self.backend.attend(q_THD, self.store.layer(layer), attention)

        return self.model(batch.token_ids_T, batch.positions_T, attend)

"""Runs one step on the device: the plan's tensors, the model over them, the draws.

Knows the order of these and nothing of what is inside: what to compute is the scheduler's decision, how the model, the
attention, the cache and the sampler do it is theirs.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.runner.batch import Batch, build_batch
from engine.sampling.logprobs import score
from engine.sampling.sampler import Sampler
from engine.stats import Stats
from engine.types import Draw, StepPlan

_SCORED_ROWS_AT_ONCE = 128  # bounds the logits of scored prompts: 128 x 150,000 float32 numbers are 77 MB


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
        """Copy the plan's blocks, compute its chunks; for each chunk in plan order its scores, then its draws."""
        with self.stats.time("forward"):
            self.store.copy_blocks(plan.copies)
            batch = build_batch(plan, block_size=self.store.block_size, device=self.device)
            hidden_TE = self._forward(batch)
        scores = iter(self._score(plan, batch, hidden_TE))
        draws = iter(self._draw(plan, batch, hidden_TE))
        return [
            result
            for chunk in plan.chunks
            for result in (*islice(scores, len(chunk.scores)), *islice(draws, chunk.seq.num_draws if chunk.samples else 0))
        ]

    def _draw(self, plan: StepPlan, batch: Batch, hidden_TE: Tensor) -> list[Draw]:
        if len(batch.sampling_rows_M) == 0:
            return []
        with self.stats.time("forward"):
            logits_MV = self.model.logits(hidden_TE[batch.sampling_rows_M])
        with self.stats.time("sample"):
            return self.sampler.draw(logits_MV, [chunk.seq for chunk in plan.sampling])

    def _score(self, plan: StepPlan, batch: Batch, hidden_TE: Tensor) -> list[Draw]:
        """In slices, since a prompt has many rows and each row's logits are as wide as the vocabulary."""
        params = [chunk.seq.request.sampling for chunk in plan.chunks for _ in chunk.scores]
        scores: list[Draw] = []
        with self.stats.time("sample"):
            for start in range(0, len(params), _SCORED_ROWS_AT_ONCE):
                rows = slice(start, start + _SCORED_ROWS_AT_ONCE)
                logits_NV = self.model.logits(hidden_TE[batch.scoring_rows_N[rows]])
                scores += score(logits_NV, batch.scored_ids_N[rows], num_top=[p.prompt_logprobs or 0 for p in params[rows]])
        return scores

    def _forward(self, batch: Batch) -> Tensor:
        attention = self.backend.plan(batch.attention)

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            self.store.write(layer, k_TKD, v_TKD, batch.slots_T)
            return self.backend.attend(q_THD, self.store.layer(layer), attention)

        return self.model(batch.token_ids_T, batch.positions_T, attend)

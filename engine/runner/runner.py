"""Runs one step on the device: the plan's tensors, the model over them, the draws.

Knows the order of these and nothing of what is inside: what to compute is the scheduler's decision, how the model, the
cache and the sampler do it is theirs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from engine.kv.store import KVStore
from engine.runner.batch import Batch, build_batch
from engine.runner.forward import Forward
from engine.sampling.logprobs import score
from engine.sampling.sampler import Sampler, wants_likeliest_only
from engine.sequence import Sequence
from engine.stats import Stats
from engine.types import Draw, StepPlan

_SCORED_ROWS_AT_ONCE = 128  # bounds the logits of scored prompts: 128 x 150,000 float32 numbers are 77 MB


class Team(Protocol):
    """The processes that share the model, as the one that draws sees them."""

    def together(self) -> AbstractContextManager[None]:
        """For a step that all of them compute; raises engine.WorkerLost where one did not."""
        ...

    def announce(self, batch: Batch) -> None:
        """Let the others compute their shares of ``batch``."""
        ...


class ModelRunner:
    """The engine's device: implements ``engine.loop.Runner`` with a real model."""

    def __init__(
        self,
        forward: Forward,
        *,
        store: KVStore,
        sampler: Sampler,
        stats: Stats,
        device: torch.device,
        team: Team,
    ) -> None:
        self.forward = forward
        self.store = store
        self.sampler = sampler
        self.stats = stats
        self.device = device
        self.team = team

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[Draw]:
        """Load and copy the plan's blocks, compute its chunks; for each chunk in plan order its scores, then its draws."""
        with self.team.together():
            return self._run(plan)

    def _run(self, plan: StepPlan) -> list[Draw]:
        with self.stats.time("forward"):
            self.store.load_blocks(plan.loads)
            placement = self.store.place(plan)
            batch = build_batch(plan, block_size=self.store.block_size, placement=placement)
            self.team.announce(batch)
            batch = batch.to(self.device)
            self.store.copy_blocks(batch.copies)
            hidden_WE = self.forward.hidden(batch)
        num_scored = len(batch.scored_ids_N)
        scores = iter(self._score(plan, batch, hidden_WE[:num_scored]))
        draws = iter(self._draw([chunk.seq for chunk in plan.sampling], hidden_WE[num_scored:]))
        return [
            result
            for chunk in plan.chunks
            for result in (*islice(scores, len(chunk.scores)), *islice(draws, chunk.seq.num_draws if chunk.samples else 0))
        ]

    def read_block(self, block: int) -> bytes:
        return self.store.read_block(block)

    def _draw(self, seqs: list[Sequence], hidden_ME: Tensor) -> list[Draw]:
        """Rows that want nothing but their likeliest token need no logits; the sampler gets those of the others."""
        plain = [wants_likeliest_only(seq) for seq in seqs]
        likeliest, drawn = iter(self._likeliest(hidden_ME, plain)), iter(self._sample(seqs, hidden_ME, plain))
        return [
            draw
            for seq, is_plain in zip(seqs, plain, strict=True)
            for draw in (islice(likeliest, 1) if is_plain else islice(drawn, seq.num_draws))
        ]

    def _likeliest(self, hidden_ME: Tensor, plain: list[bool]) -> list[Draw]:
        if not any(plain):
            return []
        with self.stats.time("forward"):
            rows_ME = hidden_ME if all(plain) else hidden_ME[torch.tensor(plain, device=self.device)]
            return self.forward.greedy(rows_ME, num_valid_tokens=self.sampler.num_valid_tokens)

    def _sample(self, seqs: list[Sequence], hidden_ME: Tensor, plain: list[bool]) -> list[Draw]:
        if all(plain):
            return []
        with self.stats.time("forward"):
            logits_MV = self.forward.logits(hidden_ME[~torch.tensor(plain, device=self.device)])
        with self.stats.time("sample"):
            return self.sampler.draw(logits_MV, [seq for seq, is_plain in zip(seqs, plain, strict=True) if not is_plain])

    def _score(self, plan: StepPlan, batch: Batch, hidden_NE: Tensor) -> list[Draw]:
        """In slices, since a prompt has many rows and each row's logits are as wide as the vocabulary."""
        params = [chunk.seq.request.sampling for chunk in plan.chunks for _ in chunk.scores]
        scores: list[Draw] = []
        with self.stats.time("sample"):
            for start in range(0, len(params), _SCORED_ROWS_AT_ONCE):
                rows = slice(start, start + _SCORED_ROWS_AT_ONCE)
                logits_NV = self.forward.logits(hidden_NE[rows])
                scores += score(logits_NV, batch.scored_ids_N[rows], num_top=[p.prompt_logprobs or 0 for p in params[rows]])
        return scores

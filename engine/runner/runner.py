"""Runs one step on the device: the plan's tensors, the model over them, the draws.

Knows the order of these and nothing of what is inside: what to compute is the scheduler's decision, how the model, the
cache and the sampler do it is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from engine.kv.store import KVStore
from engine.runner.batch import Batch, build_batch
from engine.runner.forward import Forward
from engine.sampling.drawn import Drawn
from engine.sampling.logprobs import scored
from engine.sampling.sampler import Sampler, wants_likeliest_only
from engine.sequence import Sequence
from engine.stats import Stats
from engine.transfer import sent
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelFlight:
    """Implements ``engine.overlap.Flight``. ``counts``: each chunk's numbers of scores and of draws."""

    plan: StepPlan
    counts: list[tuple[int, int]]
    scores: Callable[[], list[Draw]]
    drawn: Drawn
    stats: Stats

    def draws(self) -> list[Draw]:
        with self.stats.time("forward"):
            scores, draws = iter(self.scores()), iter(self.drawn.read())
        return [result for num_scores, num_draws in self.counts for result in (*islice(scores, num_scores), *islice(draws, num_draws))]


class ModelRunner:
    """The engine's device: implements ``engine.overlap.LaunchingRunner`` with a real model."""

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
        self._drawn_rows: dict[Sequence, int] = {}
        self._drawn_ids_M = torch.empty(0, dtype=torch.int64, device=device)

    def run(self, plan: StepPlan) -> list[Draw]:
        """Load and copy the plan's blocks, compute its chunks; for each chunk in plan order its scores, then its draws."""
        with self.team.together():
            return self.launch(plan).draws()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> ModelFlight:
        """``run`` without waiting for a GPU; a token that a sequence does not know yet is what the launch before drew for it.

        Ranks that share the model are told of the step, but only ``run`` notices where one is lost.
        """
        with self.stats.time("forward"):
            self.store.load_blocks(plan.loads)
            placement = self.store.place(plan)
            batch = build_batch(plan, block_size=self.store.block_size, placement=placement, drawn_rows=self._drawn_rows)
            self.team.announce(batch)
            batch = batch.to(self.device)
            if batch.unknown_2U.numel():
                batch.fill_in(self._drawn_ids_M)
            self.store.copy_blocks(batch.copies)
            hidden_WE = self.forward.hidden(batch)
        num_scored = len(batch.scored_ids_N)
        scores = self._score(plan, batch, hidden_WE[:num_scored])
        seqs = [chunk.seq for chunk in plan.sampling]
        drawn = self._draw(seqs, hidden_WE[num_scored:])
        self._drawn_rows, self._drawn_ids_M = {seq: row for row, seq in enumerate(seqs)}, drawn.token_ids_M
        counts = [(len(chunk.scores), chunk.seq.num_draws if chunk.samples else 0) for chunk in plan.chunks]
        return ModelFlight(plan=plan, counts=counts, scores=scores, drawn=drawn, stats=self.stats)

    def read_block(self, block: int) -> bytes:
        return self.store.read_block(block)

    def _draw(self, seqs: list[Sequence], hidden_ME: Tensor) -> Drawn:
        """Rows that want nothing but their likeliest token need no logits; the sampler gets those of the others."""
        is_plain = [wants_likeliest_only(seq) for seq in seqs]
        if all(is_plain):
            return self._likeliest(hidden_ME)
        if not any(is_plain):
            return self._sample(seqs, hidden_ME)
        plain, others = ([m for m, flag in enumerate(is_plain) if flag is wanted] for wanted in (True, False))
        plain_P, others_R = (sent(rows, dtype=torch.int64, device=self.device) for rows in (plain, others))
        likeliest = self._likeliest(hidden_ME[plain_P])
        sampled = self._sample([seqs[m] for m in others], hidden_ME[others_R])
        token_ids_M = torch.empty(len(seqs), dtype=torch.int64, device=self.device)
        token_ids_M[plain_P], token_ids_M[others_R] = likeliest.token_ids_M.long(), sampled.token_ids_M
        counts = [seq.num_draws for seq in seqs]

        def read() -> list[Draw]:
            of_plain, of_others = iter(likeliest.read()), iter(sampled.read())
            return [
                draw
                for flag, count in zip(is_plain, counts, strict=True)
                for draw in (islice(of_plain, 1) if flag else islice(of_others, count))
            ]

        return Drawn(token_ids_M, read)

    def _likeliest(self, hidden_ME: Tensor) -> Drawn:
        if len(hidden_ME) == 0:
            return Drawn(torch.empty(0, dtype=torch.int64, device=self.device), list)
        with self.stats.time("forward"):
            return self.forward.greedy(hidden_ME, num_valid_tokens=self.sampler.num_valid_tokens)

    def _sample(self, seqs: list[Sequence], hidden_ME: Tensor) -> Drawn:
        with self.stats.time("forward"):
            logits_MV = self.forward.logits(hidden_ME)
        with self.stats.time("sample"):
            return self.sampler.launch(logits_MV, seqs)

    def _score(self, plan: StepPlan, batch: Batch, hidden_NE: Tensor) -> Callable[[], list[Draw]]:
        """In slices, since a prompt has many rows and each row's logits are as wide as the vocabulary."""
        params = [chunk.seq.request.sampling for chunk in plan.chunks for _ in chunk.scores]
        parts: list[Callable[[], list[Draw]]] = []
        with self.stats.time("sample"):
            for start in range(0, len(params), _SCORED_ROWS_AT_ONCE):
                rows = slice(start, start + _SCORED_ROWS_AT_ONCE)
                logits_NV = self.forward.logits(hidden_NE[rows])
                parts.append(scored(logits_NV, batch.scored_ids_N[rows], num_top=[p.prompt_logprobs or 0 for p in params[rows]]))
        return lambda: [score for part in parts for score in part()]

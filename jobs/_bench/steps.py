"""A runner around the engine's own that writes down what each step was: its seconds, its tokens, its least cost.

Changes nothing of a step; the model's cost is engine.cost's, and what the figures are held against is others' business.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

from engine.cost import ModelCost
from engine.loop import Runner
from engine.overlap import Flight, LaunchingRunner
from engine.types import Draw, StepPlan


class Step(NamedTuple):
    """``seconds`` are from the end of the step before, so that scheduling counts too."""

    seconds: float
    num_prefill: int
    num_decode: int
    flops: float
    read_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Prefill and decode told apart, though most steps do both: a step's seconds are shared out evenly among its tokens.

    So ``decode_s`` = sum over steps of seconds x decoded tokens / all tokens of the step, and ``prefill_s`` is the rest. A token is
    decoded where it was drawn before it was computed; all others are prefill: prompts less what the cache had, and what
    is computed again after a preemption. Each answer's first token comes with its prompt's last, so decoding computes
    one token less than is generated.
    """

    prefill_tokens: int
    decode_tokens: int
    prefill_s: float
    decode_s: float

    @classmethod
    def of(cls, steps: list[Step]) -> Phases:
        decode_s = sum(step.seconds * step.num_decode / (step.num_prefill + step.num_decode) for step in steps)
        return cls(
            prefill_tokens=sum(step.num_prefill for step in steps),
            decode_tokens=sum(step.num_decode for step in steps),
            prefill_s=sum(step.seconds for step in steps) - decode_s,
            decode_s=decode_s,
        )


@dataclass(frozen=True, slots=True)
class LoggedFlight:
    """A step on its way; it is written down when its draws have come."""

    flight: Flight
    land: Callable[[], None]

    @property
    def plan(self) -> StepPlan:
        return self.flight.plan

    def draws(self) -> list[Draw]:
        draws = self.flight.draws()
        self.land()
        return draws


class StepLog:
    """Implements ``engine.loop.Runner``. Its own bookkeeping counts in no step's seconds; ``own_s`` sums it up.

    ``most_seqs`` is how many sequences the fullest step computed for.
    """

    def __init__(self, runner: Runner, *, cost: ModelCost) -> None:
        self.steps: list[Step] = []
        self.most_seqs = 0
        self.own_s = 0.0
        self._runner = runner
        self._cost = cost
        self._own_since_s = 0.0
        self._last = time.perf_counter()

    def start(self) -> None:
        """The first step's seconds begin now."""
        self._last = time.perf_counter()

    def run(self, plan: StepPlan) -> list[Draw]:
        entry = self._entry(plan)
        draws = self._runner.run(plan)
        self._land(entry)
        return draws

    def launch(self, plan: StepPlan) -> LoggedFlight:
        """Implements ``engine.overlap.LaunchingRunner`` around one."""
        entry = self._entry(plan)
        return LoggedFlight(cast(LaunchingRunner, self._runner).launch(plan), lambda: self._land(entry))

    def _entry(self, plan: StepPlan) -> Step:
        """The step but for its seconds."""
        start = time.perf_counter()
        cost = self._cost.of(plan)
        num_decode = sum(chunk.num_tokens for chunk in plan.chunks if chunk.samples and chunk.start >= chunk.seq.num_prompt)
        self.most_seqs = max(self.most_seqs, len(plan.chunks))
        own_s = time.perf_counter() - start
        self._own_since_s += own_s
        self.own_s += own_s
        return Step(0.0, plan.num_tokens - num_decode, num_decode, *cost)

    def _land(self, entry: Step) -> None:
        now = time.perf_counter()
        self.steps.append(entry._replace(seconds=now - self._last - self._own_since_s))
        self._own_since_s = 0.0
        self._last = now

    def read_block(self, block: int) -> bytes:
        return self._runner.read_block(block)

    def percentile(self, share: float) -> float:
        """The step seconds that ``share`` of the steps stay under."""
        return _percentile([step.seconds for step in self.steps], share)


def _percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1] if len(values) > 1 else values[0]

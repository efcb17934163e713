"""The engine's loop with the host one step behind: a step is launched before the draws of the one before have come.

Owns the one step that is on its way. What may go ahead is the scheduler's decision, and a token that the host does not know
yet goes from one step to the next on the device.
"""

from __future__ import annotations

from typing import Protocol

from engine.loop import Engine, Runner
from engine.types import Completion, Draw, StepPlan


class Flight(Protocol):
    """A step that is launched."""

    @property
    def plan(self) -> StepPlan: ...

    def draws(self) -> list[Draw]:
        """Wait for what ``Runner.run`` gives."""
        ...


class LaunchingRunner(Runner, Protocol):
    """A device that takes a step while it computes the one before."""

    def launch(self, plan: StepPlan) -> Flight:
        """``run`` without waiting. A chunk may reach a token past those that its sequence knows: the step before drew it."""
        ...


class OverlappedEngine(Engine):
    """Gives the answers of ``Engine``, one step later."""

    runner: LaunchingRunner
    _flight: Flight | None = None

    def step(self) -> list[Completion]:
        """Launch the next step where that hangs on nothing, then wait for the one before; returns what finished with that."""
        flight = self._flight or self._launch_next()
        with self.stats.time("schedule"):
            ahead = self.scheduler.schedule_ahead(flight.plan)
        self._flight = None if ahead is None else self.runner.launch(ahead)
        draws = flight.draws()
        with self.stats.time("schedule"):
            return self.scheduler.commit(flight.plan, draws)

    def _launch_next(self) -> Flight:
        with self.stats.time("schedule"):
            plan = self.scheduler.schedule()
        return self.runner.launch(plan)

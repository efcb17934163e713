"""Steps of a real scheduler around a model that computes nothing: every token is in exactly one phase, every second too."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from engine import Engine, Request, SamplingParams
from engine.cost import ModelCost
from engine.kv.manager import BlockManager
from engine.overlap import OverlappedEngine
from engine.scheduler.scheduler import Scheduler
from engine.types import Draw, StepPlan
from jobs._bench.steps import Phases, Step, StepLog

BLOCK_SIZE = 4
COST = ModelCost(
    num_token_weights=1,
    num_row_weights=1,
    num_layers=1,
    num_heads=1,
    head_dim=1,
    bytes_per_weight=1,
    kv_bytes_per_token=1,
    block_size=BLOCK_SIZE,
)


class Landed(NamedTuple):
    plan: StepPlan
    found: list[Draw]

    def draws(self) -> list[Draw]:
        return self.found


class Instant:
    """Draws without computing, after ``seconds``."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def run(self, plan: StepPlan) -> list[Draw]:
        time.sleep(self.seconds)
        return [Draw(len(chunk.seq.tokens) % 50, -1.0) for chunk in plan.sampling]

    def launch(self, plan: StepPlan) -> Landed:
        return Landed(plan, self.run(plan))


def answered(
    *, num_blocks: int, rows: int, seed: int = 0, seconds: float = 0.0, loop: type[Engine] = Engine
) -> tuple[Engine, StepLog, list[Request]]:
    dice = random.Random(seed)
    shared = [dice.randrange(50) for _ in range(9)]
    requests = [
        Request(
            id=row,
            prompt_token_ids=[*shared, *(dice.randrange(50) for _ in range(dice.randint(1, 12)))],
            sampling=SamplingParams(temperature=0.0, max_tokens=dice.randint(1, 12), ignore_eos=True),
        )
        for row in range(rows)
    ]
    kv = BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    scheduler = Scheduler(kv=kv, max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64, eos_token_ids=(), vocab_size=50)
    log = StepLog(Instant(seconds), cost=COST)
    engine = loop(scheduler=scheduler, runner=log)
    log.start()
    assert sum(len(completion.token_ids) for completion in engine.generate(requests)) == sum(r.sampling.max_tokens for r in requests)
    return engine, log, requests


@pytest.mark.parametrize("loop", [Engine, OverlappedEngine])
@given(seed=st.integers(0, 1000), rows=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_every_computed_token_is_in_one_phase(loop: type[Engine], seed: int, rows: int) -> None:
    """Answers whose length is known beforehand compute nothing in vain, whatever the loop."""
    engine, log, requests = answered(num_blocks=400, rows=rows, seed=seed, loop=loop)
    phases, stats = Phases.of(log.steps), engine.stats
    assert stats.num_preemptions == 0
    assert phases.prefill_tokens == stats.num_prompt_tokens - stats.num_cached_tokens
    assert phases.decode_tokens == sum(request.sampling.max_tokens for request in requests) - rows


@given(seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_what_preemption_loses_is_computed_again(seed: int) -> None:
    engine, log, requests = answered(num_blocks=12, rows=12, seed=seed)
    phases, stats = Phases.of(log.steps), engine.stats
    first_time = (
        stats.num_prompt_tokens - stats.num_cached_tokens + sum(request.sampling.max_tokens for request in requests) - len(requests)
    )
    assert phases.prefill_tokens + phases.decode_tokens == first_time + stats.num_recomputed_tokens


def test_memory_is_scarce_enough_to_preempt() -> None:
    assert any(answered(num_blocks=12, rows=12, seed=seed)[0].stats.num_preemptions for seed in range(20))


def test_seconds_are_shared_out_by_tokens() -> None:
    steps = [Step(4.0, 30, 10, 0, 0), Step(2.0, 0, 8, 0, 0), Step(1.0, 5, 0, 0, 0)]
    phases = Phases.of(steps)
    assert (phases.prefill_tokens, phases.decode_tokens) == (35, 18)
    assert phases.decode_s == pytest.approx(4.0 * 10 / 40 + 2.0)
    assert phases.prefill_s == pytest.approx(4.0 * 30 / 40 + 1.0)


def test_steps_take_the_time_that_passes() -> None:
    start = time.perf_counter()
    _, log, _ = answered(num_blocks=400, rows=4, seconds=0.01)
    elapsed = time.perf_counter() - start
    total = sum(step.seconds for step in log.steps)
    assert len(log.steps) * 0.01 <= total <= elapsed
    assert 0.01 <= log.percentile(0.5) <= log.percentile(0.99) <= max(step.seconds for step in log.steps)

"""What the host side of a step costs: scheduler, block manager and batch building around a model that computes nothing.

    python tests/bench/scheduler.py [--waiting 8192] [--running 256] [--steps 400] [--shared 1300 --rows-per-prefix 3] [--profile]

The workload has the shape of a real one: a 20-token system prompt, about 75 tokens of question, 8 to 168 tokens of answer.
Requests come in as the loop pulls them, so many a step, until the queue is full.
Times are CPU milliseconds of the one thread, so other programs on the machine do not count. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from engine.kv.manager import BlockManager
from engine.runner.batch import build_batch
from engine.sampling_params import SamplingParams
from engine.scheduler.scheduler import Scheduler
from engine.types import Draw, Request, StepPlan

BLOCK_SIZE = 16
VOCAB_SIZE = 49_152


def requests(num: int, *, shared: int, rows_per_prefix: int) -> list[Request]:
    """``num`` rows in a random order, of which each ``rows_per_prefix`` share their first ``shared`` tokens; 88 tokens out."""
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(count)]

    prefixes = [tokens(shared) for _ in range(-(-num // rows_per_prefix))]
    found = [
        Request(
            id=i,
            prompt_token_ids=prefixes[i // rows_per_prefix] + tokens(rng.randint(30, 120)),
            sampling=SamplingParams(max_tokens=rng.randint(8, 168), temperature=0.0, ignore_eos=True),
        )
        for i in range(num)
    ]
    rng.shuffle(found)
    return found


class Stopwatch:
    """CPU milliseconds of this thread, step by step, for each kind of work."""

    def __init__(self) -> None:
        self.laps: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.laps[kind].append((time.thread_time() - start) * 1e3)

    def table(self) -> str:
        rows = [f"{'ms a step':>12} {'mean':>8} {'median':>8} {'99 %':>8} {'worst':>8}"]
        for kind, laps in self.laps.items():
            ranked = sorted(laps)
            values = (sum(laps) / len(laps), ranked[len(laps) // 2], ranked[int(len(laps) * 0.99)], ranked[-1])
            rows.append(f"{kind:>12} " + " ".join(f"{value:8.3f}" for value in values))
        return "\n".join(rows)


def draws(plan: StepPlan) -> list[Draw]:
    return [Draw((chunk.seq.num_generated * 31 + len(chunk.seq.tokens)) % VOCAB_SIZE, -1.0) for chunk in plan.sampling]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, default=8192)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--budget", type=int, default=512, help="tokens a step")
    parser.add_argument("--blocks", type=int, default=6144)
    parser.add_argument("--shared", type=int, default=20, help="tokens that all prompts begin with")
    parser.add_argument("--rows-per-prefix", type=int, default=1 << 20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--profile", action="store_true", help="print where the time goes, which makes everything slower")
    options = parser.parse_args()

    scheduler = Scheduler(
        kv=BlockManager(num_blocks=options.blocks, block_size=BLOCK_SIZE),
        max_num_seqs=options.running,
        max_num_batched_tokens=options.budget,
        max_model_len=8192,
        eos_token_ids=(),
        vocab_size=VOCAB_SIZE,
    )
    stopwatch = Stopwatch()
    incoming = requests(options.waiting + 2048, shared=options.shared, rows_per_prefix=options.rows_per_prefix)
    gc.freeze()
    profile = cProfile.Profile() if options.profile else None
    if profile:
        profile.enable()
    num_done = 0
    for _ in range(options.steps):
        with stopwatch("add"):
            for _ in range(min(options.running, options.waiting - len(scheduler.waiting), len(incoming))):
                scheduler.add(incoming.pop())
        if not scheduler.has_work:
            break
        with stopwatch("schedule"):
            plan = scheduler.schedule()
        with stopwatch("batch"):
            build_batch(plan, block_size=BLOCK_SIZE)
        drawn = draws(plan)
        with stopwatch("commit"):
            num_done += len(scheduler.commit(plan, drawn))
    if profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    stats = scheduler.stats
    num_computed = stats.num_prompt_tokens - stats.num_cached_tokens
    print(stopwatch.table())
    print(
        f"{stats.num_steps} steps of {stats.num_step_seqs / stats.num_steps:.1f} sequences, {num_done} answers, "
        f"{num_computed} of {stats.num_prompt_tokens} prompt tokens computed, {stats.num_blocks_peak} blocks at most"
    )


if __name__ == "__main__":
    main()

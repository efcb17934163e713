"""What happened, as numbers: tokens, steps, preemptions, blocks, seconds by kind of work.

Everybody who does something adds to it; it decides nothing and knows nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.histogram import Histogram


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of one engine, from its start on.

    ``num_prompt_tokens`` = cached + computed, counted once a request at its first admission; work done again after a
    preemption counts in ``num_recomputed_tokens`` only. Utilisation is stored tokens / slots over the blocks that live
    sequences hold; an idle cache does not count. ``num_held``, ``num_idle``, ``num_running``, ``num_waiting`` and
    ``utilisation`` are the last step's. A first token's seconds run from the moment that its request was submitted. Steps
    before the first real one are in ``warm_up_s`` and count nowhere else. ``device_peak`` asks the device for the most bytes that it
    held at once, None where it does not count them.
    """

    num_steps: int = 0
    num_step_tokens: int = 0
    num_step_seqs: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_blocks: int = 0
    num_blocks_peak: int = 0
    num_blocks_loaded: int = 0
    kv_bytes: int = 0
    warm_up_s: float = 0.0
    device_peak: Callable[[], int | None] = lambda: None
    num_held: int = 0
    num_idle: int = 0
    num_running: int = 0
    num_waiting: int = 0
    utilisation: float = 0.0
    utilisation_sum: float = 0.0
    first_token_seconds: Histogram = field(default_factory=Histogram)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time(self, kind: str) -> Iterator[None]:
        """Add the block's wall seconds to ``seconds[kind]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start

    def record_step(
        self, *, num_seqs: int, num_tokens: int, num_waiting: int, num_held: int, num_idle: int, num_stored: int, block_size: int
    ) -> None:
        """A step over ``num_seqs`` sequences is computed, and they hold ``num_held`` blocks with ``num_stored`` tokens in them."""
        self.num_steps += 1
        self.num_step_seqs += num_seqs
        self.num_step_tokens += num_tokens
        self.num_blocks_peak = max(self.num_blocks_peak, num_held)
        self.num_held, self.num_idle = num_held, num_idle
        self.num_running, self.num_waiting = num_seqs, num_waiting
        self.utilisation = num_stored / (num_held * block_size)
        self.utilisation_sum += self.utilisation

    def record_first_token(self, submitted_s: float) -> None:
        """A request that was submitted at ``submitted_s``, on the clock of ``time.perf_counter``, has its first token."""
        self.first_token_seconds.add(time.perf_counter() - submitted_s)

    @property
    def pool_use(self) -> float:
        """The share of the pool's blocks that live sequences hold."""
        return self.num_held / max(self.num_blocks, 1)

    def snapshot(self) -> dict[str, object]:
        """The engine's share of metrics.json, under its public names."""
        steps = max(self.num_steps, 1)
        utilisation = self.utilisation_sum / steps
        waits = self.first_token_seconds
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "cached_prompt_tokens": self.num_cached_tokens,
            "computed_prompt_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "generated_tokens": self.num_generated_tokens,
            "prefix_hit_rate": self.num_cached_tokens / max(self.num_prompt_tokens, 1),
            "preemptions": self.num_preemptions,
            "recomputed_tokens": self.num_recomputed_tokens,
            "steps": self.num_steps,
            "batch_size_mean": self.num_step_seqs / steps,
            "warm_up_s": self.warm_up_s,
            "peak_device_bytes": self.device_peak(),
            "kv_bytes": self.kv_bytes,
            "kv_blocks_total": self.num_blocks,
            "kv_blocks_peak": self.num_blocks_peak,
            "kv_blocks_loaded": self.num_blocks_loaded,
            "kv_blocks_used": self.num_held,
            "kv_blocks_cached": self.num_idle,
            "kv_blocks_free": self.num_blocks - self.num_held - self.num_idle,
            "kv_utilisation": self.utilisation,
            "kv_utilisation_mean": utilisation,
            "kv_fragmentation": 1.0 - self.utilisation if self.num_steps else 0.0,
            "kv_fragmentation_mean": 1.0 - utilisation if self.num_steps else 0.0,
            "sequences_running": self.num_running,
            "sequences_waiting": self.num_waiting,
            "time_to_first_token_s": {
                "count": waits.num_values,
                "mean": waits.mean,
                "p50": waits.quantile(0.50),
                "p99": waits.quantile(0.99),
            },
            "time_split": dict(self.seconds),
        }

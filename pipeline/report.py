"""What a run came to, as numbers: rows, tokens, seconds, and their rates, under the names of ``metrics.json``.

Counts what the pipeline sees; what only the engine sees comes in as its snapshot.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine import Completion
from pipeline import durable
from pipeline.failures import FailureTally


class Stats(Protocol):
    """What an engine says of itself."""

    @property
    def pool_use(self) -> float:
        """The share of the KV pool that live sequences hold."""
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """The engine's share of metrics.json, under its public names."""
        ...


@dataclass(slots=True, kw_only=True)
class Metrics:
    """The counters of one run. All rows are input rows: ``rows_total`` of the input, ``rows_resumed`` answered before.

    Of the others ``rows_taken`` were looked at so far, ``rows_asked`` went to the engine, ``rows_done`` are answered, and
    ``failures`` of these are error rows. ``prompts_truncated`` were cut to fit (``prompt.on_overflow``). Times are seconds
    since the process began. Tokens are counted as rows finish. ``engine`` is there once it is ready.
    """

    rows_total: int
    rows_resumed: int
    rows_taken: int = 0
    rows_asked: int = 0
    rows_done: int = 0
    failures: FailureTally = field(default_factory=FailureTally)
    prompts_truncated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    engine: Stats | None = None
    engine_ready_s: float | None = None
    first_row_s: float | None = None
    last_request_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def loaded(self, engine: Stats) -> None:
        self.engine = engine
        self.engine_ready_s = process_seconds()

    def asked(self) -> None:
        """A request was handed to the engine."""
        self.rows_asked += 1
        self.last_request_s = process_seconds()

    def finished(self, completions: Sequence[Completion]) -> None:
        """A row is done, with one completion a sample; none where it never got to the engine.

        The prompt counts once, as the engine computed or found it for the first sample, and not where it was refused.
        """
        self.rows_done += 1
        if completions and completions[0].finish_reason != "error":
            self.prompt_tokens += completions[0].num_prompt_tokens
            self.cached_tokens += completions[0].num_cached_tokens
        self.generated_tokens += sum(len(completion.token_ids) for completion in completions)
        if self.first_row_s is None:
            self.first_row_s = process_seconds()

    @contextmanager
    def time(self, kind: str) -> Iterator[None]:
        """Add the block's wall seconds to ``time_split[kind]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start

    @property
    def run_seconds(self) -> float:
        """Seconds since the engine was ready."""
        return 0.0 if self.engine_ready_s is None else max(process_seconds() - self.engine_ready_s, 1e-9)

    @property
    def is_complete(self) -> bool:
        """Every row of the input is answered."""
        return self.rows_resumed + self.rows_done == self.rows_total

    @property
    def prefix_hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def summary(self, *, rows_ok: int, rows_error: int) -> dict[str, Any]:
        """The content of metrics.json.

        ``rows`` = rows_ok + rows_error are those of the finished parts; ``rows_resumed`` input rows were answered before.
        Tokens, seconds and ``rows_failed_by_code`` are this run's; its error rows count there before their part is finished.
        Rates are over the time since the engine was ready. ``tail_s`` runs from the last request that the engine took.
        The seconds of ``time_split`` are those of three threads and overlap (pipeline/README.md).
        """
        seconds = self.run_seconds
        engine = {} if self.engine is None else self.engine.snapshot()
        return {
            "rows": rows_ok + rows_error,
            "rows_ok": rows_ok,
            "rows_error": rows_error,
            "rows_failed_by_code": {code: failures.num_rows for code, failures in self.failures.by_code().items()},
            "rows_resumed": self.rows_resumed,
            "prompts_truncated": self.prompts_truncated,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_tokens,
            "computed_prompt_tokens": self.prompt_tokens - self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "prefix_hit_rate": self.prefix_hit_rate,
            **engine,
            "load_s": self.engine_ready_s,
            "first_row_s": self.first_row_s,
            "wall_s": process_seconds(),
            "tail_s": None if self.last_request_s is None else process_seconds() - self.last_request_s,
            "generated_tokens_per_s": self.generated_tokens / seconds if seconds else 0.0,
            "total_tokens_per_s": (self.prompt_tokens + self.generated_tokens) / seconds if seconds else 0.0,
            "peak_rss_bytes": peak_rss_bytes(),
            "time_split": {**engine.get("time_split", {}), **self.seconds},
        }


def write_metrics(folder: Path, metrics: Mapping[str, Any]) -> None:
    durable.replace_text(folder / "metrics.json", json.dumps(metrics, indent=2) + "\n")


def peak_rss_bytes() -> int:
    """Most memory that the process held at once; ``getrusage`` counts KiB on Linux and bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def process_seconds() -> float:
    """Seconds since the process began (Linux), else since this module was loaded."""
    return time.monotonic() - _PROCESS_START


def _process_start() -> float:
    """The process's start on the clock of ``time.monotonic``; field 22 of /proc/self/stat, in ticks since boot."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.monotonic() - age


_PROCESS_START = _process_start()

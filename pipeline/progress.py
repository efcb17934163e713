"""What a person sees while rows run: a bar on a terminal, else a plain line now and then.

Reads the run's metrics; decides and counts nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from pipeline.report import Metrics

_LINE_SECONDS = 10.0


class Progress:
    """Shows rows, rows/s, tokens/s, prefix hit rate, use of the KV pool and time left on ``stream``.

    Silent where it is not ``enabled``, and from when ``stream`` cannot be written any more.
    """

    def __init__(self, metrics: Metrics, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._metrics = metrics
        self._stream = stream if stream is not None else sys.stderr
        self._enabled = enabled
        self._bar: tqdm | None = None
        self._last_line = 0.0

    def start(self) -> None:
        """Show the first state; call it when the engine is ready, so that rates leave the load out."""
        with self._while_it_can():
            if self._enabled and self._stream.isatty():
                total, done = self._metrics.rows_total, self._metrics.rows_resumed
                self._bar = tqdm(total=total, initial=done, unit="row", file=self._stream, dynamic_ncols=True, smoothing=0.1)
            elif self._enabled:
                self._print_line()

    def update(self) -> None:
        """A row is done."""
        with self._while_it_can():
            if self._bar is not None:
                self._bar.set_postfix_str(self._rates(), refresh=False)
                self._bar.update()
            elif self._enabled and time.monotonic() - self._last_line >= _LINE_SECONDS:
                self._print_line()

    def close(self) -> None:
        """Show the last state."""
        with self._while_it_can():
            if self._bar is not None:
                self._bar.close()
            elif self._enabled:
                self._print_line()

    @contextmanager
    def _while_it_can(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._enabled, self._bar = False, None

    def _rates(self) -> str:
        metrics = self._metrics
        speed = metrics.generated_tokens / max(metrics.run_seconds, 1e-9)
        pool = f", KV pool {metrics.engine.pool_use:.0%}" if metrics.engine is not None else ""
        return f"{speed:.0f} tokens/s, prefix hits {metrics.prefix_hit_rate:.0%}{pool}"

    def _print_line(self) -> None:
        metrics = self._metrics
        done = metrics.rows_resumed + metrics.rows_done
        speed = metrics.rows_done / max(metrics.run_seconds, 1e-9)
        left = tqdm.format_interval((metrics.rows_total - done) / speed) if speed else "unknown"
        share = done / max(metrics.rows_total, 1)
        line = f"{done}/{metrics.rows_total} rows ({share:.0%}), {speed:.1f} rows/s, {self._rates()}, time left {left}"
        print(line, file=self._stream, flush=True)
        self._last_line = time.monotonic()

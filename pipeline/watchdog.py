"""Ends a process whose engine hangs: says what it was at, prints where every thread is, and exits with 1.

Knows nothing of engines: it is told that there was progress, and counts the seconds since.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

_TICK_SECONDS = 1.0


class Watchdog:
    """A thread that counts seconds while the block runs. A process that was suspended was not running, so it counts nothing.

    Args:
        seconds: without ``progressed`` before it acts; None never acts.
        state: what the run is at, as one line.
    """

    def __init__(self, seconds: float | None, *, state: Callable[[], str]) -> None:
        self._seconds = seconds
        self._state = state
        self._num_ticks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def progressed(self) -> None:
        """Something is done; any thread may say so."""
        self._num_ticks = 0

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._seconds is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._seconds is not None
        tick = min(_TICK_SECONDS, self._seconds)
        while not self._over.wait(tick):
            self._num_ticks += 1
            if self._num_ticks * tick > self._seconds:
                print(
                    f"pagemill: no step has finished for {self._seconds:g} s (stall_seconds): {self._told()}", file=sys.stderr, flush=True
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                print(
                    "pagemill: the engine hangs; finished parts stay, and the same command goes on from there", file=sys.stderr, flush=True
                )
                os._exit(1)

    def _told(self) -> str:
        try:
            return self._state()
        except Exception as error:  # it looks at what another thread may be changing, and this one must act all the same
            return f"what it is at cannot be told ({error!r})"

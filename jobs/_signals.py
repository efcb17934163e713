"""What SIGINT, SIGTERM and SIGHUP do: before rows run they end the process at once, later the first one asks it to stop.

Loads nothing, so that it can be in place before anything heavy is imported.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 75
_ONE_REQUEST_SECONDS = 0.5  # `timeout` signals a process and then its group, so the same request comes twice
# SIGINT too, though a script's background job inherits it ignored; SIGHUP, a terminal that is closed, only where nohup did not ask.
_NUMBERS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []))


def leave_at_once() -> None:
    """From now on a signal ends the process: all that is on the disk is whole at any moment."""
    for number in _NUMBERS:
        signal.signal(number, _leave)


class Stop:
    """Whether a signal asked the run to end, since ``listen``; a second one, a moment later or more, ends the process at once."""

    def __init__(self) -> None:
        self._asked_s: float | None = None

    def listen(self) -> None:
        for number in _NUMBERS:
            signal.signal(number, self._hear)

    def __call__(self) -> bool:
        return self._asked_s is not None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now
            _say("stopping after this step; once more stops at once")
        elif now - self._asked_s > _ONE_REQUEST_SECONDS:
            _leave(number, frame)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    _say("stopped; the same command goes on from there")
    os._exit(INTERRUPTED)


def _say(line: str) -> None:
    with suppress(OSError):
        os.write(2, f"pagemill: {line}\n".encode())  # not print, which the signal may have interrupted

"""A thread of its own beside the caller's, for as long as a block runs: what ``Ahead`` and ``Behind`` have in common.

Owns the thread, its lock and its error; what it does, it does not know.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self


class Beside(ABC):
    """Runs ``_run`` in a thread while the block runs; to leave the block is to wait until that has returned.

    Whoever inherits waits with ``_changed`` and notifies it of every change. What ``_run`` raises, whatever it is, becomes
    ``_error``: it is the caller's thread that has to end by it.
    """

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._is_over = False  # the block is left
        self._has_ended = False  # and so is the thread
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_to_end, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    @abstractmethod
    def _run(self) -> None:
        """Go on until all is done, or ``_is_over``."""

    def _leave(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        try:
            self._wait_for_end()
        finally:  # a Ctrl-C ends the waiting, not the work; whoever comes next must find it done
            self._wait_for_end()
            self._thread.join()  # not sooner: to Python a thread whose join is interrupted has ended

    def _run_to_end(self) -> None:
        error: BaseException | None = None
        try:
            self._run()
        except BaseException as raised:
            error = raised
        with self._changed:
            self._error, self._has_ended = error, True
            self._changed.notify_all()

    def _wait_for_end(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended)

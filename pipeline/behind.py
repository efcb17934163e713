"""A thread that works behind: it does one thing after the other that somebody else need not wait for.

Owns the queue; what is done, it is told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from pipeline.beside import Beside

T = TypeVar("T")


class Behind(Beside, Generic[T]):
    """Does ``work`` with every item that it is given, in their order, in a thread of its own while the block runs.

    To leave the block is to wait until all is done. The first error, whatever it is, ends it: nothing more is done, and ``check``
    and the end of the block raise it.

    Args:
        most: items that wait at once, beside the one that is being worked on.

    Attributes:
        left: once the block is left, the items that were given and not done; the first is the one that failed.
        seconds: spent so far on the items that are done.
    """

    def __init__(self, work: Callable[[T], None], *, most: int) -> None:
        super().__init__("behind")
        self.left: list[T] = []
        self.seconds = 0.0
        self._work = work
        self._most = most
        self._items: deque[T] = deque()  # the first is being worked on

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._leave()
        finally:
            if self._has_ended:  # else somebody who is in a hurry went on, and the thread still has them
                self.left = list(self._items)
        if error is not self._error:
            self.check()

    @property
    def is_idle(self) -> bool:
        """Whether what is given next is begun at once."""
        return not self._items

    def check(self) -> None:
        """Raises what the work raised."""
        if self._error is not None:
            raise self._error

    def has_room(self, timeout: float) -> bool:
        """Whether one more item may be given within ``timeout`` seconds; raises what the work raised."""
        with self._changed:
            has_room = self._changed.wait_for(lambda: len(self._items) <= self._most or self._has_ended, timeout)
        self.check()
        return has_room

    def give(self, item: T) -> None:
        with self._changed:
            assert len(self._items) <= self._most, "ask for room first"
            self._items.append(item)
            self._changed.notify_all()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            start = time.perf_counter()
            try:
                self._work(item)
            finally:
                self.seconds += time.perf_counter() - start
            with self._changed:
                self._items.popleft()
                self._changed.notify_all()

    def _next(self) -> T | None:
        """The item to work on, when there is one; None when all is done and nothing will follow."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_over)
            return self._items[0] if self._items else None

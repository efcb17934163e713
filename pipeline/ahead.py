"""A thread that works ahead: it draws from a source before anybody asks, and holds a bounded number of items until they are taken.

Owns the queue; what the items are, and what becomes of them, it does not know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Generic, TypeVar

from pipeline.beside import Beside

T = TypeVar("T")


class Ahead(Beside, Generic[T], Iterator[T]):
    """The items of ``source`` in their order; they are drawn while the block runs, in a thread of its own.

    The thread alone runs the source, and closes it. What the source raises, whatever it is, is raised where its next item would
    have been. To leave the block is to wait for the item that is just being drawn, at most.

    Args:
        most: one more item is drawn as long as those that are not taken yet weigh less than this.
        weigh: an item's weight; by default each weighs 1.
    """

    def __init__(self, source: Generator[T, None, None], *, most: int, weigh: Callable[[T], int] = lambda item: 1) -> None:
        super().__init__("ahead")
        self._source = source
        self._most = most
        self._weigh = weigh
        self._weight = 0
        self._items: deque[T] = deque()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()

    def is_ready(self, timeout: float) -> bool:
        """Whether the next item, or the end, is there within ``timeout`` seconds, so that ``next`` will not wait."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items) or self._has_ended, timeout)

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._has_ended)
            if self._items:
                item = self._items.popleft()
                self._weight -= self._weigh(item)
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _run(self) -> None:
        with closing(self._source):
            if not self._has_room():
                return
            for item in self._source:
                with self._changed:
                    self._items.append(item)
                    self._weight += self._weigh(item)
                    self._changed.notify_all()
                if not self._has_room():
                    return

    def _has_room(self) -> bool:
        """Wait until one more item may be drawn; False where none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._weight < self._most)
            return not self._is_over

"""A thread that works ahead: it draws from a source before anybody asks, and holds a bounded number of items until they are taken.

Owns the thread and its queue; what the items are, and what becomes of them, it does not know.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T], Iterator[T]):
    """The items of ``source`` in their order; they are drawn while the block runs, in a thread of its own.

    The thread alone runs the source, and closes it. What the source raises, whatever it is, is raised where its next item would
    have been. To leave the block is to wait for the item that is just being drawn, at most.

    Args:
        most: one more item is drawn as long as those that are not taken yet weigh less than this.
        weigh: an item's weight; by default each weighs 1.
    """

    def __init__(self, source: Generator[T, None, None], *, most: int, weigh: Callable[[T], int] = lambda item: 1) -> None:
        self._source = source
        self._most = most
        self._weigh = weigh
        self._weight = 0
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_at_end = False
        self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._draw, name="ahead", daemon=True)

    def __enter__(self) -> Ahead[T]:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()

    def is_ready(self, timeout: float) -> bool:
        """Whether the next item, or the end, is there within ``timeout`` seconds, so that ``next`` will not wait."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._items) or self._is_at_end, timeout)

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_at_end)
            if self._items:
                item = self._items.popleft()
                self._weight -= self._weigh(item)
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _draw(self) -> None:
        try:
            with closing(self._source):
                while self._has_room():
                    item = next(self._source)
                    with self._changed:
                        self._items.append(item)
                        self._weight += self._weigh(item)
                        self._changed.notify_all()
        except StopIteration:
            pass
        except BaseException as error:  # a template may raise SystemExit: it is the taker's thread that has to end by it
            self._error = error
        finally:
            with self._changed:
                self._is_at_end = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until one more item may be drawn; False where none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._weight < self._most)
            return not self._is_over

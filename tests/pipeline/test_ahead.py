"""The thread that works ahead: the source's items in order, never too many of them, and its errors in their place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator

import pytest

from pipeline.ahead import Ahead


class Source:
    """Counts up; knows what was drawn, by which thread, and whether it was closed there."""

    def __init__(self, count: int, *, error: BaseException | None = None, seconds: float = 0.0) -> None:
        self.count = count
        self.error = error
        self.seconds = seconds
        self.num_drawn = 0
        self.closed_by: threading.Thread | None = None

    def items(self) -> Generator[int, None, None]:
        try:
            for number in range(self.count):
                self.num_drawn += 1
                time.sleep(self.seconds)
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed_by = threading.current_thread()


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_the_items_come_in_their_order_and_are_drawn_elsewhere() -> None:
    source = Source(1000)
    with Ahead(source.items(), most=7) as ahead:
        assert list(ahead) == list(range(1000))
        assert next(ahead, None) is None
    assert source.closed_by not in (None, threading.current_thread())


@pytest.mark.parametrize("most", [1, 5])
def test_never_more_are_drawn_than_there_is_room_for(most: int) -> None:
    source = Source(100)
    with Ahead(source.items(), most=most) as ahead:
        for num_taken in range(20):
            deadline = time.monotonic() + 5
            while source.num_drawn < num_taken + most and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.005)
            assert source.num_drawn == num_taken + most, "it fills up, and no further"
            assert next(ahead) == num_taken


def test_items_count_by_their_weight() -> None:
    source = Source(100)
    with Ahead(source.items(), most=10, weigh=lambda number: number) as ahead:
        time.sleep(0.1)
        assert source.num_drawn == 5, "0, 1, 2, 3 and 4 weigh 10"
        assert list(ahead) == list(range(100))


@pytest.mark.parametrize("error", [ValueError("x"), OSError("x"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_error_is_raised_behind_the_items_before_it(error: BaseException) -> None:
    found = []

    def take_all() -> None:
        with Ahead(Source(3, error=error).items(), most=5) as ahead:
            time.sleep(0.02)  # it has happened when the first item is taken
            for item in ahead:
                found.append(item)

    with pytest.raises(type(error)) as caught:
        take_all()
    assert found == [0, 1, 2]
    assert caught.value is error


def test_to_leave_is_to_wait_for_one_item_at_most() -> None:
    source = Source(1000, seconds=0.05)
    began = time.monotonic()
    with Ahead(source.items(), most=500) as ahead:
        assert next(ahead) == 0
    assert time.monotonic() - began < 0.5
    assert source.closed_by is not None


def test_it_says_whether_there_is_anything_to_take() -> None:
    with Ahead(Source(1, seconds=0.2).items(), most=1) as ahead:
        assert not ahead.is_ready(0.01)
        assert ahead.is_ready(5)
        assert next(ahead) == 0
        assert ahead.is_ready(5), "the end is something too"
        assert list(ahead) == []


def test_the_source_is_closed_though_the_waiting_is_interrupted(press_ctrl_c: Callable[[], None]) -> None:
    drawing, leaving, ended = threading.Event(), threading.Event(), threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            drawing.set()
            leaving.wait()
            time.sleep(0.1)
            press_ctrl_c()
            time.sleep(0.2)
            yield 0
        finally:
            ended.set()

    def take_nothing() -> None:
        with Ahead(items(), most=1):
            drawing.wait()
            leaving.set()

    with pytest.raises(KeyboardInterrupt):
        take_nothing()
    assert ended.is_set()

"""The thread that works behind: everything done in order, a bounded queue, and errors that reach whoever gave the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pipeline.behind import Behind


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def test_all_is_done_in_order_when_the_block_is_left() -> None:
    done: list[tuple[int, threading.Thread]] = []
    with Behind(lambda item: (time.sleep(0.001), done.append((item, threading.current_thread()))), most=3) as behind:
        for item in range(50):
            while not behind.has_room(1.0):
                pass
            behind.give(item)
    assert [item for item, _ in done] == list(range(50))
    assert threading.current_thread() not in {thread for _, thread in done}
    assert behind.left == []
    assert 0.05 <= behind.seconds < 5


def test_all_is_done_though_the_block_is_left_by_an_error() -> None:
    done: list[int] = []

    def give_and_fail() -> None:
        with Behind(lambda item: (time.sleep(0.01), done.append(item)), most=3) as behind:
            for item in range(4):
                behind.give(item)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_and_fail()
    assert done == [0, 1, 2, 3]


def test_all_is_done_though_the_waiting_is_interrupted(press_ctrl_c: Callable[[], None]) -> None:
    done: list[int] = []
    leaving = threading.Event()

    def work(item: int) -> None:
        leaving.wait()
        time.sleep(0.1)
        press_ctrl_c()
        time.sleep(0.2)
        done.append(item)

    def give_and_leave() -> None:
        with Behind(work, most=3) as behind:
            behind.give(0)
            leaving.set()

    with pytest.raises(KeyboardInterrupt):
        give_and_leave()
    assert done == [0]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_so_many_may_wait_and_no_more(most: int) -> None:
    go = threading.Event()
    with Behind(lambda item: go.wait(), most=most) as behind:
        assert behind.is_idle
        for _ in range(most + 1):
            assert behind.has_room(1.0)
            behind.give(0)
            assert not behind.is_idle
        assert not behind.has_room(0.05)
        go.set()
        assert behind.has_room(5.0)


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("x"), SystemExit(2), KeyboardInterrupt()])
@pytest.mark.parametrize("how", ["check", "has_room", "leave", "leave by another"])
def test_the_first_error_ends_the_work_and_is_told(error: BaseException, how: str) -> None:
    done: list[int] = []
    begun = threading.Event()

    def work(item: int) -> None:
        begun.wait()
        if item == 2:
            raise error
        done.append(item)

    behind = Behind(work, most=9)

    def give_all() -> None:
        with behind:
            for item in range(5):
                behind.give(item)
            begun.set()
            deadline = time.monotonic() + 5
            while how in ("check", "has_room") and time.monotonic() < deadline:
                behind.check() if how == "check" else behind.has_room(0.01)
            if how == "leave by another":
                raise ZeroDivisionError

    with pytest.raises(type(error)) as caught:
        give_all()
    assert caught.value is error
    assert done == [0, 1]
    assert behind.left == [2, 3, 4]

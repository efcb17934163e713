"""The process of a rank other than 0: computes its share of every batch that rank 0 announces, and ends when rank 0 does.

Knows where its orders come from; what becomes of them is engine.build's.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from queue import SimpleQueue
from typing import IO, Any, NoReturn


def main(rank: int) -> NoReturn:
    """Follow the orders on standard input; never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 decides what they mean
        signal.signal(number, signal.SIG_IGN)
    orders: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, orders), daemon=True).start()
    try:
        from engine.build import build_worker

        compute = build_worker(rank=rank, **orders.get())
        while True:
            compute(orders.get())
    except BaseException:
        _fail()


def _fail() -> NoReturn:
    """Leave the reason for rank 0 to tell, and nothing that could wait for other ranks on the way out."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def _read(stream: IO[bytes], orders: SimpleQueue[Any]) -> None:
    """In a thread, so that rank 0's end is noticed at any moment: also while the main one waits for it."""
    try:
        while True:
            orders.put(pickle.load(stream))
    except EOFError:
        os._exit(0)
    except BaseException:
        _fail()


if __name__ == "__main__":
    main(int(sys.argv[1]))

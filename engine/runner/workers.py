"""The processes of the other ranks: started, told what to compute, watched, ended.

Knows what goes to them and whether they live; what they do is engine.worker's, what the ranks exchange is engine.runner.parallel's.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import IO, Any

import torch
from torch import Tensor

from engine.runner.batch import Batch
from engine.runner.parallel import Group, Meeting
from engine.types import WorkerLost

_KEY = "engine.tensor_parallel"
# A lost process breaks its connections before it can be seen to have ended.
_SEEN_WITHIN_S = 3.0
_ENDS_WITHIN_S = 10.0
_LAST_WORDS = 2000


class Workers:
    """Ranks 1 to ``num_ranks`` - 1, each a process that lives no longer than this one, however this one ends.

    They read orders from their standard input: first ``settings``, then a batch for each step. Its end is theirs.
    """

    def __init__(self, num_ranks: int, *, settings: Mapping[str, Any]) -> None:
        self.num_ranks = num_ranks
        self._settings = settings
        self._meeting = Meeting(num_ranks)
        self._group: Group | None = None
        self._closing = False
        self._lost: SimpleQueue[int] = SimpleQueue()  # ranks that ended before they were told to; others follow the first
        self._words: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, num_ranks):
                self._start(rank)
        except BaseException:
            self._kill()
            raise

    def join(self, device: torch.device) -> Group:
        """The group of all ranks, this process being rank 0; call it ``together``."""
        self._tell({**self._settings, "port": self._meeting.port})
        while not self._meeting.is_complete():
            self._raise_if_lost()
            time.sleep(0.02)
        self._group = self._meeting.join(device)
        return self._group

    def announce(self, batch: Batch) -> None:
        """Let the others compute ``batch`` too."""
        self._tell(batch)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside is done by all ranks, or by none: an error leaves them out of step, so it ends them.

        Raises:
            WorkerLost: a rank is lost, and what was done inside does not count.
        """
        if self._closing:
            raise WorkerLost(f"{_KEY}={self.num_ranks}: the workers have been ended, so load the engine again")
        try:
            yield
            self._raise_if_lost()
        except BaseException as error:
            # A lost rank can show as any fault of torch's. What refuses a setting does so in all ranks, and is not that.
            is_loss = isinstance(error, WorkerLost) or (isinstance(error, RuntimeError) and not self._lost.empty())
            reason = self._reason(error) if is_loss else None
            self._kill()
            if reason is None:
                raise
            raise WorkerLost(reason) from error

    def close(self) -> None:
        """End them between two steps; returns when they are gone."""
        self._closing = True
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_ENDS_WITHIN_S)
        self._kill()

    def _kill(self) -> None:
        self._closing = True
        for process, words in zip(self._processes, self._words, strict=True):
            process.kill()
            process.wait()
            words.close()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()

    def _start(self, rank: int) -> None:
        words = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.worker", str(rank)],  # -P: a folder called engine may lie where the user is
            env=os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
            stdin=subprocess.PIPE,
            stdout=words,
            stderr=words,
        )
        self._words.append(words)
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), name=f"watches worker {rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        if not self._closing:
            self._lost.put(rank)
            if self._group is not None:
                self._group.abort()

    def _tell(self, order: object) -> None:
        message = io.BytesIO()
        _Pickler(message, protocol=5).dump(order)
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(message.getbuffer())
                process.stdin.flush()
        except OSError as error:
            raise WorkerLost(str(error)) from error

    def _raise_if_lost(self) -> None:
        if not self._lost.empty():
            raise WorkerLost("one has ended")

    def _reason(self, error: BaseException) -> str:
        """Who ended first, how, and what it said last; a process is seen to have ended a moment after its connections are."""
        try:
            rank = self._lost.get(timeout=_SEEN_WITHIN_S)
        except Empty:
            return f"{_KEY}={self.num_ranks}: a worker does not answer: {error}"
        code = self._processes[rank - 1].wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        words = self._words[rank - 1]
        words.seek(max(0, words.seek(0, os.SEEK_END) - _LAST_WORDS))
        said = words.read().decode(errors="replace").strip()
        return f"{_KEY}={self.num_ranks}: worker {rank} ended {how}" + (f"; its last words were:\n{said}\n" if said else "")


class _Pickler(pickle.Pickler):
    """Tensors go as numpy's arrays: torch's own way takes ten times as long for small ones."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented

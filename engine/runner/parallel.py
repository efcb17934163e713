"""The processes that run one model together, a device each, and what they tell one another in a step: torch.distributed.

Knows tensors and not what they mean; who starts the processes, and what becomes of one that is lost, is engine.runner.workers'.
"""

from __future__ import annotations

import functools
import operator
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from engine.layers.share import WHOLE, Share
from engine.types import WorkerLost

# Ranks do the same work at the same time, so one that lags this far behind hangs.
TIMEOUT_S = 600.0
_HOST = "127.0.0.1"


class Group:
    """``num_ranks`` processes, this one being ``rank``. An operation returns when all have called it, in the same order.

    The groups are this object's own, not torch's global ones, so a process may have several or be in another program's.
    """

    def __init__(self, store: Any, *, rank: int, num_ranks: int, device: torch.device) -> None:
        """Returns when all ranks are there.

        Raises:
            WorkerLost: they did not come.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = device
        self._store = store
        with _lost():
            self._backend = _nccl(store, rank, num_ranks) if device.type == "cuda" else _gloo(store, rank, num_ranks)

    @classmethod
    def join(cls, port: int, *, rank: int, num_ranks: int, device: torch.device) -> Group:
        """The group of the ``Meeting`` at ``port``, as another rank than 0."""
        from torch.distributed import TCPStore

        store = TCPStore(_HOST, port, num_ranks, is_master=False, timeout=_timeout())
        store.set(_ready(rank), "")
        return cls(store, rank=rank, num_ranks=num_ranks, device=device)

    def share(self, *, batch_invariant: bool) -> Share:
        """This rank's share of the model. With ``batch_invariant`` a row's sums do not depend on the rows beside it, bit for bit."""
        return Share(rank=self.rank, num_ranks=self.num_ranks, all_reduce=self.ordered_sum if batch_invariant else self.sum)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, in its place; of more than two, the order may depend on the place in the tensor."""
        with _lost():
            self._backend.allreduce([x]).wait()
        return x

    def ordered_sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, in the order of the ranks."""
        parts = [torch.empty_like(x) for _ in range(self.num_ranks)]
        with _lost():
            self._backend.allgather([parts], [x]).wait()
        return functools.reduce(operator.add, parts)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        import torch.distributed as dist

        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        numbers = torch.tensor([number], device=self.device)
        with _lost():
            self._backend.allreduce([numbers], options).wait()
        return int(numbers.item())

    def abort(self) -> None:
        """Break off what waits for a lost rank. Gloo does so by itself, when the connection ends."""
        with suppress(RuntimeError):
            self._backend.abort()


class Alone:
    """A group of one process, and its team: there is nobody to start, to tell or to wait for."""

    def join(self, device: torch.device) -> Alone:
        return self

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def announce(self, batch: object) -> None:
        pass

    def close(self) -> None:
        pass

    def share(self, *, batch_invariant: bool) -> Share:
        return WHOLE

    def least(self, number: int) -> int:
        return number


class Meeting:
    """Where the ranks find one another: a table in rank 0's process, which this machine's other processes alone can reach."""

    def __init__(self, num_ranks: int) -> None:
        from torch.distributed import TCPStore

        listener = socket.create_server((_HOST, 0))  # left to itself, the table would listen to the whole network
        self.num_ranks = num_ranks
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            _HOST, self.port, num_ranks, is_master=True, timeout=_timeout(), wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def is_complete(self) -> bool:
        """Whether all others are there."""
        return bool(self._store.check([_ready(rank) for rank in range(1, self.num_ranks)]))

    def join(self, device: torch.device) -> Group:
        """The group, this process being rank 0."""
        return Group(self._store, rank=0, num_ranks=self.num_ranks, device=device)


def _timeout() -> timedelta:
    return timedelta(seconds=TIMEOUT_S)


def _ready(rank: int) -> str:
    return f"ready/{rank}"


def _gloo(store: Any, rank: int, num_ranks: int) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
    options._timeout = _timeout()
    return ProcessGroupGloo(store, rank, num_ranks, options)


def _nccl(store: Any, rank: int, num_ranks: int) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = _timeout()
    return ProcessGroupNCCL(store, rank, num_ranks, options)


@contextmanager
def _lost() -> Iterator[None]:
    """What torch raises when a rank is gone, or does not answer in time, is a RuntimeError like any other."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerLost(str(error)) from error

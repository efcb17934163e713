"""Records what a GPU is asked to do once, and asks it again at one call's cost on the host.

Knows no model: what is recorded reads its inputs from tensors that stay where they are, and so does whoever reads the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[[], Tensor]


class Graphs(Protocol):
    """Where computations are recorded."""

    def record(self, compute: Compute) -> Compute:
        """``compute`` again: each call gives what it would for what its inputs hold by then, always in the same tensor."""
        ...


class CudaGraphs:
    """CUDA graphs that share their memory, since one runs at a time: whoever needs a result longer takes a copy."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> Compute:
        """Runs ``compute`` once before, on a stream beside, so that what is set up at a first call is not recorded."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            compute()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


class EagerGraphs:
    """Computes anew at each call, on any device: what is seen from outside is what CUDA graphs show."""

    def record(self, compute: Compute) -> Compute:
        result = compute().clone()

        def replay() -> Tensor:
            return result.copy_(compute())

        return replay

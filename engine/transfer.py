"""Numbers on their way between host and device, without either waiting for the other's work.

Knows shapes and dtypes; what the numbers say is the caller's business. What the host sends is pinned where the device is a
GPU: a transfer from other memory would wait for all that the GPU was asked to do before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; a kernel that is compiled for aligned pointers serves every one of the tensors


def sent(numbers: SequenceOf[float], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``numbers`` as a tensor [N] on the device."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Fetch:
    """A tensor on its way to the host, behind what the device was asked to do so far and before all that it is asked later."""

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def tolist(self) -> list[Any]:
        if self._done is not None:
            self._done.synchronize()
        return list(self._host.tolist())


class Packed:
    """Tensors of fixed ``shapes`` beside one another in one buffer; ``tensors`` are views of it, each begins at 16 bytes."""

    def __init__(self, shapes: SequenceOf[tuple[int, ...]], *, dtype: torch.dtype, device: torch.device) -> None:
        step = _ALIGNMENT // dtype.itemsize
        sizes = [math.prod(shape) for shape in shapes]
        *self._starts, self._size = accumulate((-(-size // step) * step for size in sizes), initial=0)
        self._flat = torch.empty(self._size, dtype=dtype, device=device)
        pieces = zip(self._starts, sizes, shapes, strict=True)
        self.tensors: list[Tensor] = [self._flat[start : start + size].view(shape) for start, size, shape in pieces]

    def send(self, arrays: SequenceOf[npt.NDArray[np.int64]], *, padding: int = 0) -> None:
        """Overwrite the tensors; what an array is shorter than its tensor in the first dimension is filled with ``padding``."""
        host = torch.full((self._size,), padding, dtype=self._flat.dtype, pin_memory=self._flat.device.type == "cuda")
        flat = host.numpy()
        for array, tensor, start in zip(arrays, self.tensors, self._starts, strict=True):
            assert array.shape[1:] == tensor.shape[1:] and len(array) <= len(tensor), "more than there is room for"
            flat[start : start + array.size] = array.ravel()
        self._flat.copy_(host, non_blocking=True)

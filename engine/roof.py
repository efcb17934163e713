"""How fast this machine can be: operations a second of a large product, bytes a second of a long read, both measured.

Knows torch's products and the CPU's own kernels, nothing of a model.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.cpu.decoder import PackedLinear

_WIDTH = {"cpu": 2048, "cuda": 8192}  # inputs and outputs of the product
_NUM_ROWS = {"cpu": (128, 256, 1024), "cuda": (8192,)}
_READ_BYTES = 2**30  # far more than caches hold
_SECONDS = 0.3  # for each candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """The two limits of the roofline model (Williams, Waterman and Patterson 2009).

    Attributes:
        flops_per_s: of the fastest product, ``2 x rows x inputs x outputs / seconds``.
        gemm: which one that was.
        read_bytes_per_s: of the fastest pass over 1 GiB, or what half of the free memory allows.
    """

    flops_per_s: float
    gemm: str
    read_bytes_per_s: float

    def seconds(self, *, flops: float, read_bytes: float) -> float:
        """The least time for so much work: that of the limit that binds."""
        return max(flops / self.flops_per_s, read_bytes / self.read_bytes_per_s)


@torch.inference_mode()
def measure_roof(
    *, dtype: torch.dtype, device: torch.device, num_threads: int, free_bytes: int, kernels: ctypes.CDLL | None = None, int8: bool = False
) -> Roof:
    """Measure for about three seconds; torch's thread count stays as it is.

    Products are torch's in ``dtype`` and those of the CPU's own ``kernels``, in bfloat16 and with ``int8`` in 8 bits too. What is
    kept is the best of several passes: everything else that runs on the machine can only make it slower.
    """
    products = list(_products(dtype=dtype, device=device, num_threads=num_threads, kernels=kernels, int8=int8))
    rates = {name: num_flops / _least_seconds(multiply, device) for name, num_flops, multiply in products}
    gemm = max(rates, key=lambda name: rates[name])
    return Roof(flops_per_s=rates[gemm], gemm=gemm, read_bytes_per_s=_read_rate(device, free_bytes))


def _products(
    *, dtype: torch.dtype, device: torch.device, num_threads: int, kernels: ctypes.CDLL | None, int8: bool
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Each candidate's name, operations and call."""
    width = _WIDTH[device.type]
    weight, x = (torch.randn(n, width, device=device).to(dtype) for n in (width, max(_NUM_ROWS[device.type])))
    called: dict[str, Callable[[Tensor], Tensor]] = {f"torch {str(dtype).removeprefix('torch.')}": lambda rows: rows @ weight.T}
    if kernels is not None:
        own = weight.bfloat16()
        called["own bfloat16"] = PackedLinear(kernels, own, num_threads=num_threads)
        if int8:
            called["own int8"] = PackedLinear(kernels, own, int8=True, num_threads=num_threads)
    for name, call in called.items():
        for num_rows in _NUM_ROWS[device.type]:
            rows = x[:num_rows].bfloat16() if name.startswith("own") else x[:num_rows]
            yield f"{name}, {num_rows} rows", 2 * num_rows * width * width, lambda call=call, rows=rows: call(rows)  # type: ignore[misc]


def _read_rate(device: torch.device, free_bytes: int) -> float:
    num_bytes = min(_READ_BYTES, free_bytes // 2) // 2**20 * 2**20
    numbers = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    matrix, vector = numbers.view(-1, 4096), torch.ones(4096, device=device)
    candidates: tuple[Callable[[], object], ...] = (numbers.sum, numbers.max, lambda: matrix @ vector)
    return max(num_bytes / _least_seconds(read, device) for read in candidates)


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of at least three calls, after one that warms up."""
    seconds: list[float] = []
    call()
    begin = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)

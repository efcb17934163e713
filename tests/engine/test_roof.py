"""The limits are in the units they claim, and the limit that binds is the one that counts."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import roof
from engine.kernels.cpu import build
from engine.roof import Roof, measure_roof

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roof, "_WIDTH", {"cpu": 128})
    monkeypatch.setattr(roof, "_NUM_ROWS", {"cpu": (8, 16)})
    monkeypatch.setattr(roof, "_SECONDS", 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_are_those_that_torch_counts(dtype: torch.dtype) -> None:
    products = list(roof._products(dtype=dtype, device=CPU, num_threads=1, kernels=None, int8=False))
    assert len(products) == 2
    for _, num_flops, multiply in products:
        with FlopCounterMode(display=False) as counter:
            multiply()
        assert counter.get_total_flops() == num_flops


def test_reads_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a known length: the rate is the bytes over it, for what there is room for."""
    monkeypatch.setattr(roof, "_least_seconds", lambda call, device: 0.5)
    assert roof._read_rate(CPU, free_bytes=2**40) == 2**31
    assert roof._read_rate(CPU, free_bytes=2**27) == 2**27


def test_least_seconds_are_seconds() -> None:
    assert 0.01 <= roof._least_seconds(lambda: time.sleep(0.01), CPU) < 0.1


def test_measures_every_kind_of_product(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        kernels = build.load()
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    names = [name for name, _, _ in roof._products(dtype=torch.bfloat16, device=CPU, num_threads=1, kernels=kernels, int8=True)]
    assert names == [f"{kind}, {rows} rows" for kind in ("torch bfloat16", "own bfloat16", "own int8") for rows in (8, 16)]
    found = measure_roof(dtype=torch.bfloat16, device=CPU, num_threads=1, free_bytes=2**24, kernels=kernels, int8=True)
    assert found.gemm in names and found.flops_per_s > 0 and found.read_bytes_per_s > 0


def test_the_limit_that_binds_counts() -> None:
    limits = Roof(flops_per_s=100.0, gemm="", read_bytes_per_s=10.0)
    assert limits.seconds(flops=1000, read_bytes=1) == 10
    assert limits.seconds(flops=1, read_bytes=50) == 5

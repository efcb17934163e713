"""The machine's answers against the kernel's own files, and what is refused."""

from __future__ import annotations

import os

import pytest
import torch

from engine import device as device_module
from engine.device import Device, usable_cpus


def test_unknown_and_absent_devices_are_refused():
    with pytest.raises(ValueError, match=r"engine\.device: 'tpu'"):
        Device.find("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"engine\.device: cuda"):
            Device.find("cuda")


def test_auto_dtype_is_bfloat16_only_where_native():
    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        device = Device(kind="cpu", native_bfloat16=native, num_threads=1)
        assert device.dtype("auto") == expected
        assert device.dtype("float16") == torch.float16


def test_threads_are_asked_or_given():
    assert Device.find("cpu", threads=3).num_threads == 3
    assert 1 <= Device.find("cpu").num_threads == usable_cpus() <= os.cpu_count()


def test_free_bytes_are_under_the_machines_memory():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < Device.find("cpu").free_bytes() <= total


def test_only_a_gpu_counts_the_most_that_it_held(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda index: 1000 + index)
    assert Device(kind="cuda", native_bfloat16=True, num_threads=1, index=3).held_bytes_peak() == 1003
    assert Device.find("cpu").held_bytes_peak() is None


def test_control_group_limits_count(tmp_path, monkeypatch):
    """A container with 3 GB of which 1 GB is used, 0.25 GB of that droppable file cache, and half a CPU more than two."""
    files = {
        "memory.max": "3000000000",
        "memory.current": "1000000000",
        "memory.stat": "anon 700000000\ninactive_file 200000000\nactive_file 50000000",
        "cpu.max": "250000 100000",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(device_module, "_control_groups", lambda: [tmp_path])
    monkeypatch.setattr(device_module, "_available_bytes", lambda: 10**12)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    device = Device.find("cpu")
    assert device.free_bytes() == 2_250_000_000
    assert device.num_threads == 2

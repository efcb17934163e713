"""What this machine offers: the device, its number types, its free memory, the threads to use.

Knows nothing of models; every question is asked of the machine here and nowhere else.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where tensors live: on the CPU, or on GPU ``index``. ``native_bfloat16``: the hardware multiplies it, faster than float32."""

    kind: Literal["cpu", "cuda"]
    native_bfloat16: bool
    num_threads: int
    index: int = 0

    @classmethod
    def find(cls, name: str = "auto", *, threads: int | None = None) -> Device:
        """The device called ``name``: cpu, cuda, or auto for the GPU where there is one.

        ``threads`` None: as many as this process may run on at once.

        Raises:
            ValueError: it is not there; the message names engine.device.
        """
        if name not in ("auto", "cpu", "cuda"):
            raise ValueError(f"engine.device: {name!r} is not one of auto, cpu, cuda")
        num_threads = threads or usable_cpus()
        if name != "cpu" and torch.cuda.is_available():
            return cls(kind="cuda", native_bfloat16=torch.cuda.is_bf16_supported(including_emulation=False), num_threads=num_threads)
        if name == "cuda":
            raise ValueError("engine.device: cuda was asked for, but torch finds no usable GPU here; use engine.device=cpu or auto")
        native = not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
        return cls(kind="cpu", native_bfloat16=native, num_threads=num_threads)

    def of_rank(self, rank: int, *, num_ranks: int) -> Device:
        """The device of process ``rank`` of ``num_ranks``: a GPU each, or its part of the CPU's threads.

        Raises:
            ValueError: there are fewer GPUs; the message names engine.tensor_parallel.
        """
        if self.kind == "cuda" and num_ranks > torch.cuda.device_count():
            raise ValueError(f"engine.tensor_parallel: {num_ranks} GPUs are asked for, and torch finds {torch.cuda.device_count()}")
        return replace(self, index=rank, num_threads=max(1, self.num_threads // num_ranks))

    def take(self) -> None:
        """Let this process compute there."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.index)
        else:
            torch.set_num_threads(self.num_threads)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def hardware(self) -> str:
        """What computes: machines where this is equal can be expected to round alike."""
        if self.kind == "cuda":
            return str(torch.cuda.get_device_name())
        return " ".join([platform.machine(), *sorted(cpu_flags())])

    def dtype(self, name: str) -> torch.dtype:
        """``model.dtype`` as torch's: auto is bfloat16 where it is native, else float32."""
        if name == "auto":
            return torch.bfloat16 if self.native_bfloat16 else torch.float32
        return _DTYPES[name]

    def free_bytes(self) -> int:
        """Bytes that can be allocated now: the GPU's, or what the machine and this process's control groups leave."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(self.index)[0])
        return min(_available_bytes(), *_control_group_headroom())

    @property
    def computes_apart(self) -> bool:
        """Whether it computes while the host goes on: then steps are rehearsed and recorded, and launched one ahead."""
        return self.kind == "cuda"

    def held_bytes_peak(self) -> int | None:
        """Most bytes that this process's tensors held on it at once, since ``peak_bytes`` was last asked; None where none are counted."""
        return int(torch.cuda.max_memory_allocated(self.index)) if self.kind == "cuda" else None

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Bytes that ``call`` holds at most beside what is held already."""
        assert self.kind == "cuda", "only a GPU's allocator counts"
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)


def usable_cpus() -> int:
    """CPUs this process may use at once: its affinity mask, cut by a control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _control_groups():
        quota = _words(folder / "cpu.max")
        if len(quota) == 2 and quota[0] != "max":
            allowed = min(allowed, max(1, int(quota[0]) // int(quota[1])))
    return allowed


def cpu_flags() -> set[str]:
    """Instruction sets as Linux names them: ``flags`` on x86, ``Features`` on Arm."""
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(values.split())
    return set()


def _available_bytes() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group_headroom() -> list[int]:
    """For each limit on this process's memory: the limit less what is used, file cache that can be dropped not counted."""
    room = []
    for folder in _control_groups():
        for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = _words(folder / limit_name), _words(folder / used_name)
            if limit and used and limit[0] != "max":
                stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                droppable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
                room.append(max(0, int(limit[0]) - int(used[0]) + droppable))
    return room or [_available_bytes()]


def _control_groups() -> list[Path]:
    """The folders of this process's control groups and their parents, versions 1 and 2."""
    root = Path("/sys/fs/cgroup")
    found = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / controllers
            own = top / path.lstrip("/")
            found += [own, *(parent for parent in own.parents if parent.is_relative_to(top))]
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or a file that this kernel does not have
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()

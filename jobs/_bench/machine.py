"""Where a figure was measured: the code's revision, the libraries, the processor, the memory, the GPU.

Asks the machine; measures nothing.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def code_here() -> dict[str, Any]:
    """The version, and where a checkout runs its commit and whether files differ from it; None for an installed wheel."""
    folder = Path(__file__).absolute().parents[2]
    revision = _git(folder, "rev-parse", "--short=12", "HEAD") if (folder / ".git").exists() else None
    changes = None if revision is None else _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "version": version("pagemill"),
        "revision": revision,
        "dirty": None if changes is None else changes != "",
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def machine_here() -> dict[str, Any]:
    """``cores`` are the machine's, ``usable_cpus`` what this process may use at once, ``tier`` the instruction set that the CPU's own
    kernels are built for (None: they are switched off), ``gpu`` the first one's name."""
    import torch

    from engine.device import usable_cpus
    from engine.kernels.cpu import build

    try:
        tier: str | None = build.tier_here()
    except build.Unavailable:
        tier = None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": _num_cores(),
        "usable_cpus": usable_cpus(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "tier": tier,
        "gpu": str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None,
    }


def _cpu_name() -> str:
    names = _cpuinfo("model name")
    return names[0] if names else platform.processor() or platform.machine()


def _num_cores() -> int | None:
    """Physical cores; where the system does not tell them apart, its CPUs."""
    places = set(zip(_cpuinfo("physical id"), _cpuinfo("core id"), strict=False))
    return len(places) or os.cpu_count()


def _cpuinfo(name: str) -> list[str]:
    """What /proc/cpuinfo says under ``name``, CPU by CPU; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name]


def _git(folder: Path, *words: str) -> str | None:
    """git's answer, None where there is no git or it refuses."""
    try:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

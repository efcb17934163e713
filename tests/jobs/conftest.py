"""The installed command, started in an empty folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def command() -> str:
    """The installed ``pagemill``."""
    path = Path(sys.executable).parent / "pagemill"
    if not path.exists():
        pytest.skip("the pagemill command is not installed here: pip install -e .")
    return str(path)


@pytest.fixture
def pagemill(command: str, tmp_path: Path) -> Run:
    """``pagemill(*words)`` starts the command in an empty folder and returns what came out."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    return run

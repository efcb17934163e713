"""A run that is killed again and again, at any moment, and started again each time: byte for byte what one run writes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

NUM_ROWS = 72


@pytest.fixture
def start() -> Iterator[Callable[[Path, Path], tuple[int, Callable[[], int]]]]:
    """``start(source, target)`` begins a run and returns its process id and what waits for its exit code."""
    script = Path(__file__).with_name("forking_runs.py")
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        requests, answers = server.stdin, server.stdout
        assert requests is not None and answers is not None

        def begin(source: Path, target: Path) -> tuple[int, Callable[[], int]]:
            requests.write(f"{source} {target}\n")
            requests.flush()
            return int(answers.readline()), lambda: int(answers.readline())

        yield begin


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"id": i, "prompt": "" if i % 9 == 4 else f"row {i} " + "word " * (i * 7 % 40)} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """The parts as they are, the lists without their order: parts are finished in another one."""
    lists = {path.name: b"".join(sorted(path.read_bytes().splitlines(keepends=True))) for path in folder.glob("*.jsonl")}
    return {path.name: path.read_bytes() for path in folder.glob("part-*")} | lists


@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 6), (signal.SIGTERM, 3)])
def test_a_run_that_is_ended_at_any_moment_goes_on(start, source: Path, tmp_path: Path, number: signal.Signals, times: int) -> None:
    began = time.monotonic()
    _, code = start(source, tmp_path / "whole")
    assert code() == 0
    seconds = time.monotonic() - began
    dice, ended = random.Random(number), 0
    while ended < times:
        pid, code = start(source, tmp_path / "out")
        time.sleep(dice.uniform(0.0, 2 * seconds / times))
        with suppress(ProcessLookupError):  # it was done
            os.kill(pid, number)
        found = code()
        assert found in (0, 75 if number == signal.SIGTERM else -number)
        ended += found != 0
        if found == 0:  # it came to the end: take some parts away for the next ones
            for part in dice.sample(sorted((tmp_path / "out").glob("part-*")), 5):
                part.unlink()
    _, code = start(source, tmp_path / "out")
    assert code() == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not [path.name for path in (tmp_path / "out").iterdir() if "tmp" in path.name or path.name.startswith("_damaged")]

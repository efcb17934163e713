"""A run over several processes ends as any other run does, and takes all of them along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


def workers_of(parent: int) -> list[int]:
    """Running children that compute for ``parent``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"engine.worker" in (folder / "cmdline").read_bytes():
                _, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                found += [int(folder.name)] if int(owner) == parent else []
        except OSError:  # it ended meanwhile
            continue
    return found


def lives(pid: int) -> bool:
    """Whether it runs: one that nobody has asked for its exit code is still listed, without a command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


@pytest.fixture
def words(command: str, tiny_model: str, tmp_path: Path) -> list[str]:
    """A command that takes many seconds, with two processes."""
    rows = [{"id": str(i), "prompt": f"row {i}"} for i in range(120)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["model.dtype=float32", "job=generate", "sampling.max_tokens=60", "sampling.ignore_eos=true", "engine.tensor_parallel=2"]
    pool = ["kv_cache.num_blocks=100", "engine.max_num_seqs=4", "engine.device=cpu", "engine.threads=2", "output.token_ids=true"]
    return [command, "run", f"input.path={tmp_path}/in.jsonl", f"output.path={tmp_path}/out", f"model.path={tiny_model}", *settings, *pool]


@pytest.fixture
def running(words: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command when it has answered some rows and kept them."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, start_new_session=True
    ) as process:
        kept = tmp_path / "out" / "part-00000.tmp"
        for _ in range(600):
            if (kept.exists() and kept.stat().st_size > 0) or process.poll() is not None:
                break
            time.sleep(0.1)
        assert process.poll() is None, process.communicate()
        yield process
        if process.poll() is None:
            process.kill()


def answers(folder: Path) -> dict[str, list[int]]:
    with pa.ipc.open_file(folder / "part-00000.arrow") as part:
        rows = part.read_all()
    return dict(zip(rows["row_id"].to_pylist(), rows["token_ids"].to_pylist(), strict=True))


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_killed_worker_ends_the_run_which_then_goes_on(running, words, tmp_path, goes_on: bool) -> None:
    (worker,) = workers_of(running.pid)
    os.kill(worker, signal.SIGKILL)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "engine.tensor_parallel=2: worker 1 ended by SIGKILL" in said and "the same command goes on from there" in said
    assert "Traceback" not in said
    assert not lives(worker)
    if not goes_on:
        return

    one_process = [*words, "engine.tensor_parallel=1"]  # which is no other run
    done = subprocess.run(one_process, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0 and "from an earlier run" in done.stdout, done.stderr
    at_once = [*one_process, f"output.path={tmp_path}/at-once"]
    assert subprocess.run(at_once, capture_output=True, check=False, timeout=120).returncode == 0
    assert answers(tmp_path / "out") == answers(tmp_path / "at-once")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_a_signal_to_all_processes_is_heard_by_the_first_alone(running, number) -> None:
    """As Ctrl-C in a terminal and a service's stop come."""
    (worker,) = workers_of(running.pid)
    os.killpg(running.pid, number)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, "stopped early (signal)" in said) == (75, True), said
    assert not lives(worker)


def test_workers_end_with_a_killed_run(running) -> None:
    (worker,) = workers_of(running.pid)
    running.kill()
    running.wait(timeout=60)
    for _ in range(100):
        if not lives(worker):
            break
        time.sleep(0.1)
    assert not lives(worker)

"""One output folder, one run: a second one is refused with the first one's name, and a dead one blocks nobody."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.lock import locked

HOLD = """
import sys
from pathlib import Path
from pipeline.lock import locked
with locked(Path(sys.argv[1]), key="output.path"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_told_who_has_the_folder_and_a_dead_one_is_nobody(tmp_path: Path) -> None:
    with holder(tmp_path / "out") as first:
        with pytest.raises(ValueError, match=rf"output\.path: .* process {first.pid} on {socket.gethostname()}, which began at 20\d\d-"):
            locked(tmp_path / "out", key="output.path").__enter__()
        first.send_signal(signal.SIGKILL)
    with locked(tmp_path / "out", key="output.path"):
        assert f'"pid": {os.getpid()}' in (tmp_path / "out" / "_lock").read_text()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_with_something_in_it_stays(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with locked(folder, key="output.path"):
        (folder / "part").touch()
    assert [path.name for path in folder.iterdir()] == ["part"]
    with locked(tmp_path, key="output.path"):
        pass
    assert tmp_path.exists()


def test_a_lock_that_was_just_let_go_and_taken_by_another_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is gone when we get it: whoever came between has a new one."""
    flock, others = fcntl.flock, []

    def late(stream, flags):
        if not others:
            (tmp_path / "_lock").unlink()
            others.append((tmp_path / "_lock").open("w"))
            flock(others[0], fcntl.LOCK_EX)
        flock(stream, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ValueError, match="is in use by another run"):
        locked(tmp_path, key="output.path").__enter__()
    others[0].close()
    with locked(tmp_path, key="output.path"):
        pass


def test_never_two_at_once(tmp_path: Path) -> None:
    inside, most, rounds = [0], [0], [0]
    refusals: set[str] = set()

    def take() -> None:
        while rounds[0] < 300:
            try:
                with locked(tmp_path, key="output.path"):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    rounds[0] += 1
                    inside[0] -= 1
            except ValueError as refusal:
                refusals.add(str(refusal))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert not {refusal for refusal in refusals if "is in use by" not in refusal}


def test_a_run_refuses_a_folder_in_use_and_touches_nothing(run_job, write_jsonl, tmp_path: Path) -> None:
    rows = write_jsonl([{"prompt": "a"}])
    folder = tmp_path / "out"
    with locked(folder, key="output.path"):
        (folder / "kept").touch()
        for resume in ("auto", "never", "force"):
            with pytest.raises(ValueError, match=r"output\.path: .* is in use by process"):
                run_job(rows, resume=resume)
        assert sorted(path.name for path in folder.iterdir()) == ["_lock", "kept"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write into, root neither")
def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output\.path: '/proc/answers' cannot be written or locked"):
        locked(Path("/proc/answers"), key="output.path").__enter__()

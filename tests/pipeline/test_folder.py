"""One output folder, one run: a second one is refused with the first one's name, and a dead one blocks nobody."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.folder import held

HOLD = "import sys; from pipeline.folder import held\nwith held(sys.argv[1]): print('held', flush=True); sys.stdin.read()"


def holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_told_who_has_the_folder_and_a_dead_one_is_nobody(tmp_path: Path) -> None:
    with holder(tmp_path / "out") as first:
        with pytest.raises(ValueError, match=rf"output\.path: .* process {first.pid} on {socket.gethostname()}, which began at 20\d\d-"):
            held(str(tmp_path / "out")).__enter__()
        first.send_signal(signal.SIGKILL)
    with held(str(tmp_path / "out")) as folder:
        assert f'"pid": {os.getpid()}' in (folder / "_lock").read_text()
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_with_something_in_it_stays(tmp_path: Path) -> None:
    with held(str(tmp_path / "new" / "out")) as folder:
        (folder / "part").touch()
    assert [path.name for path in folder.iterdir()] == ["part"]
    with held(str(tmp_path)):
        pass
    assert tmp_path.exists()


def test_never_two_at_once(tmp_path: Path) -> None:
    inside, most, rounds = [0], [0], [0]

    def take() -> None:
        while rounds[0] < 300:
            try:
                with held(str(tmp_path)):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    rounds[0] += 1
                    inside[0] -= 1
            except ValueError:
                pass

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_a_run_refuses_a_folder_in_use_and_touches_nothing(run_job, write_jsonl, tmp_path: Path) -> None:
    rows = write_jsonl([{"prompt": "a"}])
    with held(str(tmp_path / "out")) as folder:
        (folder / "kept").touch()
        for resume in ("auto", "never", "force"):
            with pytest.raises(ValueError, match=r"output\.path: .* is in use by process"):
                run_job(rows, resume=resume)
        assert sorted(path.name for path in folder.iterdir()) == ["_lock", "kept"]

"""The first signal is heard between two steps, the second ends the process at once, and nothing else gets in between."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys, time
from jobs._signals import Stop, leave_at_once
leave_at_once()
stop = Stop()
if sys.argv[1] == "listening":
    stop.listen()
print("ready", flush=True)
while not stop():
    time.sleep(0.01)
print("heard", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("state", ["listening", "not yet"])
def test_one_signal_asks_and_two_end(state: str, number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, state], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        if state == "listening":
            assert process.stdout.readline() == "heard\n"
            time.sleep(0.6)
            assert process.poll() is None
            process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    said = ["pagemill: stopping after this step; once more stops at once"] if state == "listening" else []
    assert errors.splitlines() == [*said, "pagemill: stopped; the same command goes on from there"]


def test_a_request_that_comes_twice_at_once_is_one() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, "listening"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "heard\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.kill()


@pytest.mark.parametrize("state", ["listening", "not yet"])
def test_nohup_is_obeyed(state: str) -> None:
    words = ["nohup", sys.executable, "-c", PROGRAM, state]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.kill()

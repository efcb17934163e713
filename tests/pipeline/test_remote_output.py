"""An output folder behind a URL holds what a folder here would, whatever breaks between the two, and no part is computed twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipeline import RunError

ROWS = [{"id": i, "prompt": "" if i == 11 else f"the same words {i % 3}"} for i in range(40)]
URL = "memory://bucket/answers"


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], dict[str, bytes]]]:
    """``bucket()``: the files behind the URL; empty at first, with a user's cache of its own."""
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    yield lambda: {Path(name).name: files.cat_file(name) for name in files.find("/bucket")}
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def whole(run_job, write_jsonl, tmp_path: Path) -> dict[str, bytes]:
    """The files of a run into a folder here, but what tells of times."""
    run_job(write_jsonl(ROWS), out="whole")
    return told(tmp_path / "whole")


def told(folder: Path) -> dict[str, bytes]:
    return compared({path.name: path.read_bytes() for path in folder.iterdir()})


def compared(files: dict[str, bytes]) -> dict[str, bytes]:
    lists = {name: b"".join(sorted(data.splitlines(keepends=True))) for name, data in files.items() if name.endswith(".jsonl")}
    return {name: data for name, data in files.items() if name != "metrics.json"} | lists


def scratch(tmp_path: Path) -> Path:
    return next((tmp_path / "cache" / "outputs").iterdir())


def test_what_is_uploaded_is_what_a_folder_here_holds(run_job, write_jsonl, bucket, whole, tmp_path: Path) -> None:
    summary = run_job(write_jsonl(ROWS), out=URL)
    assert compared(bucket()) == whole
    assert summary.output_path == URL
    assert "metrics.json" in bucket()
    assert not list(scratch(tmp_path).glob("part-*")), "a part that is uploaded takes no room here"
    assert run_job(write_jsonl(ROWS), out=URL).num_resumed == 40


def test_another_machine_goes_on_from_what_is_uploaded(run_job, write_jsonl, bucket, whole, scripted_engine, tmp_path: Path) -> None:
    path = write_jsonl(ROWS)
    assert run_job(path, out=URL, engine=scripted_engine(max_waiting=6, stop_after=20)).stopped
    finished = sum(name.startswith("part-") for name in bucket())
    assert finished > 0
    shutil.rmtree(tmp_path / "cache")
    assert run_job(path, out=URL).num_resumed == 8 * finished
    assert compared(bucket()) == whole


def test_this_machine_goes_on_from_its_working_parts_too(run_job, write_jsonl, bucket, whole, scripted_engine) -> None:
    path = write_jsonl(ROWS)
    run_job(path, out=URL, engine=scripted_engine(max_waiting=6, stop_after=20))
    assert run_job(path, out=URL).num_resumed == 21  # the row without a prompt is settled without an answer
    assert compared(bucket()) == whole


@pytest.mark.parametrize("call", ["put_file", "mv"])
@pytest.mark.parametrize("number", [1, 3, 6, 9, 14])
def test_an_upload_that_fails_is_kept_and_goes_first_the_next_time(
    run_job, write_jsonl, bucket, whole, scripted_engine, tmp_path: Path, monkeypatch, call: str, number: int
) -> None:
    path = write_jsonl(ROWS)
    calls = [0]
    plain = getattr(MemoryFileSystem, call)

    def failing(self, *args, **settings):
        calls[0] += 1
        if calls[0] == number:
            raise RuntimeError("the line is dead")
        return plain(self, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, call, failing)
        with pytest.raises(RunError, match=rf"output\.path: {URL} cannot be reached: the line is dead.* is in {tmp_path}/cache"):
            run_job(path, out=URL, engine=scripted_engine(max_waiting=6))
    finished = len(list(scratch(tmp_path).glob("part-*.arrow"))) + sum(name.startswith("part-") for name in bucket())
    second = scripted_engine()
    summary = run_job(path, out=URL, engine=second)
    assert summary.num_resumed >= 8 * max(0, finished - 1)  # the last one may be in both places
    assert len(second.asked) <= 40 - summary.num_resumed
    assert compared(bucket()) == whole
    assert not list(scratch(tmp_path).glob("part-*"))


def test_two_machines_that_lost_each_other_are_told(run_job, write_jsonl, scripted_engine, tmp_path: Path, monkeypatch) -> None:
    path = write_jsonl(ROWS)

    def dead(self, source, target, **settings):
        if "part-" in target:
            raise RuntimeError("the line is dead")
        return plain(self, source, target, **settings)

    plain = MemoryFileSystem.put_file
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", dead)
        with pytest.raises(RunError):
            run_job(path, out=URL)
    (tmp_path / "cache").rename(tmp_path / "first")
    run_job(path, out=URL)  # the other machine
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "first").rename(tmp_path / "cache")
    with pytest.raises(ValueError, match=r"another machine went on .* take that folder away"):
        run_job(path, out=URL)
    shutil.rmtree(tmp_path / "cache")
    assert run_job(path, out=URL).num_resumed == 40


def test_a_part_of_another_size_is_set_aside(run_job, write_jsonl, bucket, whole) -> None:
    path = write_jsonl(ROWS)
    run_job(path, out=URL)
    fsspec.filesystem("memory").pipe_file("/bucket/answers/part-00002.arrow", b"cut")
    assert run_job(path, out=URL).num_resumed == 32
    found = bucket()
    assert found.pop("_damaged-part-00002.arrow") == b"cut"
    assert compared(found) == whole


def test_force_starts_over_there_and_other_settings_are_refused(run_job, write_jsonl, bucket) -> None:
    path = write_jsonl(ROWS)
    run_job(path, out=URL)
    with pytest.raises(ValueError, match="other settings"):
        run_job(path, out=URL, fingerprint={"model": "other"})
    run_job(write_jsonl(ROWS[:8]), out=URL, fingerprint={"model": "other"}, resume="force")
    assert [name for name in sorted(bucket()) if name.startswith("part-")] == ["part-00000.arrow"]
    assert json.loads(bucket()["_run.json"])["fingerprint"] == {"model": "other"}
    with pytest.raises(ValueError, match="is not empty and resume=never"):
        run_job(path, out=URL, resume="never")


def test_a_place_of_ones_own_for_the_work(run_job, write_jsonl, bucket, tmp_path: Path) -> None:
    run_job(write_jsonl(ROWS), out=URL, output={"scratch": str(tmp_path / "fast")})
    assert (tmp_path / "fast" / "_manifest.jsonl").exists()
    assert not (tmp_path / "cache").exists()
    assert pa.ipc.open_file(bucket()["part-00004.arrow"]).read_all().num_rows == 8


def test_a_place_that_is_out_of_reach_is_refused(run_job, write_jsonl) -> None:
    with pytest.raises(ValueError, match=r"output\.path: nowhere://x/y cannot be reached: .*nowhere"):
        run_job(write_jsonl(ROWS), out="nowhere://x/y")

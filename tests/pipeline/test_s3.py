"""Rows out of S3 and answers into it, from processes that die and uploads that fail: byte for byte what a run here writes."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from pipeline import RunError

ROWS = [{"id": i, "prompt": "" if i % 9 == 4 else f"row {i} " + "word " * (i * 7 % 40)} for i in range(40)]
NUM_PARTS = 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, where the scratch folders are: without it this is another machine."""
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def here(write_jsonl) -> Path:
    """The rows as a folder of two files."""
    write_jsonl(ROWS[:24], name="rows/a.jsonl")
    return write_jsonl(ROWS[24:], name="rows/b.jsonl").parent


@pytest.fixture
def there(here: Path, store) -> str:
    """The same folder in the store."""
    store.files.put(str(here), f"s3://{store.bucket}/rows", recursive=True)
    return f"s3://{store.bucket}/rows"


@pytest.fixture
def url(store) -> str:
    return f"s3://{store.bucket}/out/answers"


@pytest.fixture
def uploaded(store, url: str, tmp_path: Path) -> Callable[[], dict[str, bytes]]:
    """``uploaded()``: what is in the store."""

    def download() -> dict[str, bytes]:
        shutil.rmtree(tmp_path / "uploaded", ignore_errors=True)
        store.files.get(url, str(tmp_path / "uploaded"), recursive=True)
        return contents(tmp_path / "uploaded")

    return download


@pytest.fixture
def whole(run_job, here: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run writes into a folder here."""
    run_job(here, out="whole")
    return contents(tmp_path / "whole")


def contents(folder: Path) -> dict[str, bytes]:
    """All files but what tells of times and settings; of the lists only the lines: parts are finished in another order."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}
    return files | {name: b"".join(sorted(data.splitlines(keepends=True))) for name, data in files.items() if name.endswith(".jsonl")}


def num_parts(files: Iterable[str | Path]) -> int:
    return sum(re.search(r"part-\d+\.arrow$", str(name)) is not None for name in files)


def test_runs_that_are_killed_between_two_uploads_go_on_on_another_machine(
    store, here: Path, there: str, url: str, uploaded, cache: Path, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("forking_runs.py")
    words = f"import aiobotocore.session, runpy, s3fs; runpy.run_path({str(script)!r}, run_name='__main__')"  # imported once for all
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        requests, answers = server.stdin, server.stdout
        assert requests is not None
        assert answers is not None

        def ended(source: object, target: object, *, kill_at: str = "never") -> int:
            """The exit code of a run, which is killed when it asks the store for the second time for what is like ``kill_at``."""
            requests.write(f"{source} {target}\n")
            requests.flush()
            pid, asked = int(answers.readline()), itertools.count(1)

            def door(request: str) -> None:
                if re.search(kill_at, request) and next(asked) == 2:
                    os.kill(pid, signal.SIGKILL)

            store.door = door
            return int(answers.readline())

        assert ended(here, tmp_path / "whole") == 0
        for kill_at in (r"PUT .*_manifest\.jsonl\.tmp$", r"PUT .*part-\d+\.arrow$"):
            assert ended(there, url, kill_at=kill_at) == -signal.SIGKILL
            shutil.rmtree(cache)
        assert 2 <= num_parts(store.files.find(url)) < NUM_PARTS
        assert ended(there, url) == 0
    assert uploaded() == contents(tmp_path / "whole")


@pytest.mark.parametrize("refused", [r"PUT .*part-0000[3-9]\.arrow\.tmp$", r"PUT .*part-0000[3-9]\.arrow$"])
def test_an_upload_that_fails_stays_here_and_is_made_by_the_next_run(
    store, there: str, url: str, whole, uploaded, run_job, scripted_engine, cache: Path, refused: str
) -> None:
    store.door = lambda request: "403 Forbidden" if re.search(refused, request) else None
    with pytest.raises(RunError, match=rf"output\.path: {re.escape(url)} cannot be reached: .*; what was not uploaded is in {cache}"):
        run_job(there, out=url, engine=scripted_engine(max_waiting=12))
    store.door = lambda request: None
    kept = num_parts(cache.glob("outputs/*/*"))
    finished = kept + num_parts(uploaded())
    assert kept == 1 < finished < NUM_PARTS
    second = scripted_engine()
    assert run_job(there, out=url, engine=second).num_resumed >= 8 * finished
    assert len(second.asked) <= len(ROWS) - 7 * finished
    assert uploaded() == whole
    assert not num_parts(cache.glob("outputs/*/*"))


def test_a_store_that_is_busy_for_a_moment_is_asked_again(store, there: str, url: str, whole, uploaded, run_job) -> None:
    busy = iter(["503 Service Unavailable"])
    store.door = lambda request: next(busy, None) if re.search("PUT .*part-00003", request) else None
    run_job(there, out=url)
    assert next(busy, None) is None
    assert uploaded() == whole


def test_a_machine_with_nothing_in_its_scratch_computes_only_what_is_not_uploaded(
    store, there: str, url: str, whole, uploaded, run_job, scripted_engine, cache: Path
) -> None:
    run_job(there, out=url)
    shutil.rmtree(cache)
    store.files.rm_file(f"{url}/part-00002.arrow")
    second = scripted_engine()
    assert run_job(f"{there}/*.jsonl", out=url, engine=second).num_resumed == 32
    assert [request.id for request in second.asked] == [f"a.jsonl:{row}" for row in range(16, 24) if ROWS[row]["prompt"]]
    assert uploaded() == whole


def test_where_all_is_done_nothing_is_loaded_and_nothing_uploaded(
    store, there: str, url: str, whole, uploaded, run_job, cache: Path
) -> None:
    def load() -> None:
        raise AssertionError("an engine was loaded")

    run_job(there, out=url)
    for _ in range(2):
        store.door = lambda request: "403 Forbidden" if re.search(r"PUT (?!.*metrics\.json)", request) else None
        assert run_job(there, out=url, load_engine=load).num_resumed == len(ROWS)
        shutil.rmtree(cache)
    assert uploaded() == whole


@pytest.mark.parametrize("path", ["s3://a-slip/answers", "s3://a-slip"])
def test_a_bucket_that_is_not_there_is_refused_and_not_made(store, there: str, run_job, path: str) -> None:
    with pytest.raises(ValueError, match=rf"^output\.path: {path} cannot be reached: .*bucket does not exist"):
        run_job(there, out=path, load_engine=lambda: pytest.fail("an engine was loaded"))
    assert "a-slip" not in store.files.ls("")


def test_a_bucket_alone_is_an_output_path(store, there: str, whole, run_job, tmp_path: Path) -> None:
    store.files.mkdir(f"{store.bucket}-alone")
    run_job(there, out=f"s3://{store.bucket}-alone")
    store.files.get(f"s3://{store.bucket}-alone/", str(tmp_path / "alone"), recursive=True)
    assert contents(tmp_path / "alone") == whole

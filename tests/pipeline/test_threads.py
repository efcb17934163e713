"""The threads ahead of and behind the engine: they change when things happen, and nothing else."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import Limits, RunError, durable
from pipeline.asking import ask
from pipeline.journal import Journal
from pipeline.ledger import Ledger
from pipeline.reader import open_reader
from pipeline.types import Shard
from pipeline.writer import PartWriter


class InTurn:
    """What Ahead and Behind do, by the one thread that asks: the reference."""

    def __init__(self, what: Any, **bounds: Any) -> None:
        self.what = what
        self.left: list[Any] = []
        self.seconds = 0.0
        self.is_idle = True

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Generator[Any, None, None]:
        return self.what

    def __next__(self) -> Any:
        return next(self.what)

    def is_ready(self, timeout: float) -> bool:
        return True

    has_room = is_ready

    def check(self) -> None:
        pass

    def give(self, item: Any) -> None:
        self.what(item)


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before  # an earlier test's may end meanwhile


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("metrics.json", "_lock")}


def random_rows(dice: random.Random) -> list[Any]:
    kinds = [
        lambda i: {"id": i, "prompt": "word " * dice.randrange(1, 30) + f"{i}"},
        lambda i: {"id": i, "prompt": ""},
        lambda i: {"id": i, "prompt": "x", "sampling_params": {"n": 0}},
        lambda i: {"id": i, "prompt": "x" * 5000},
        lambda i: "{no json",
    ]
    return [dice.choices(kinds, weights=[20, 1, 1, 1, 1])[0](i) for i in range(dice.randrange(1, 300))]


@pytest.mark.parametrize("seed", range(8))
def test_every_byte_is_as_without_threads(run_job, write_jsonl, scripted_engine, tmp_path, monkeypatch, seed: int) -> None:
    dice = random.Random(seed)
    path = write_jsonl(random_rows(dice))
    settings = {
        "input": {"rows_per_shard": dice.choice([3, 10, 50, 100])},
        "output": {"format": dice.choice(["arrow", "jsonl"]), "token_ids": True},
    }
    max_waiting, stop_after = dice.choice([1, 7, 200]), dice.choice([None, dice.randrange(1, 100)])
    monkeypatch.setattr("pipeline.runner.MAX_OPEN_ROWS", dice.choice([40, 4096]))
    asked = []
    for out in ("turn", "threads"):
        engines = [scripted_engine(max_waiting=max_waiting, stop_after=stop_after), scripted_engine(max_waiting=max_waiting)]
        with monkeypatch.context() as patch:
            if out == "turn":
                patch.setattr("pipeline.runner.Ahead", InTurn)
                patch.setattr("pipeline.runner.Behind", InTurn)
            else:
                patch.setattr(durable, "append_lines", _late(durable.append_lines, dice))
                patch.setattr("pipeline.asking.ask", _late_batches(dice))
            for engine in engines:
                run_job(path, out=out, engine=engine, **settings)
        asked.append([[request.id for request in engine.asked] for engine in engines])
    assert asked[0] == asked[1]
    assert contents(tmp_path / "turn") == contents(tmp_path / "threads")


def _late(function: Callable[..., None], dice: random.Random) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        time.sleep(dice.random() * 0.004)
        function(*arguments)

    return call


def _late_batches(dice: random.Random) -> Callable[..., Iterator[Any]]:
    def call(*arguments: Any) -> Iterator[Any]:
        for batch in ask(*arguments):
            time.sleep(dice.random() * 0.004)
            yield batch

    return call


def test_rows_are_asked_for_a_bounded_number_ahead(run_job, write_jsonl, scripted_engine, text_job, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.runner.MAX_AHEAD_ROWS", 128)

    class Counting(type(text_job())):
        def request(self, record, *, prompt_token_ids):
            rows.append(record.row_key)
            return super().request(record, prompt_token_ids=prompt_token_ids)

    class Looking(scripted_engine):
        def generate(self, requests):
            for completion in super().generate(requests):
                time.sleep(0.001)
                ahead.append(len(rows) - len(self.asked))
                yield completion

    rows: list[str] = []
    ahead: list[int] = []
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(600)])
    summary = run_job(path, engine=Looking(max_waiting=10), job=Counting(text_job().prompts), input={"rows_per_shard": 64})
    assert summary.num_ok == 600
    assert max(ahead) <= 128 + 64 + 64, "two batches may come on top: the last one drawn, and the one that the engine is being given"
    assert max(ahead[:400]) >= 128


def test_full_shards_wait_for_the_disk_in_a_bounded_number_and_on_the_disk(
    run_job, read_parts, write_jsonl, scripted_engine, tmp_path, monkeypatch
) -> None:
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(80)])
    run_job(path, out="whole")
    monkeypatch.setattr("pipeline.runner.FLUSH_SECONDS", 1e9)
    go, held_up = threading.Event(), threading.Event()
    commit = Ledger.commit

    def hold_up(*arguments: Any, **settings: Any) -> Any:
        held_up.set()
        go.wait()
        return commit(*arguments, **settings)

    def look() -> None:
        held_up.wait()
        time.sleep(0.3)
        waiting.append(sorted(name.name for name in (tmp_path / "out").glob("part-*")))
        for name in waiting[0]:
            rows = Journal(tmp_path / "out" / name, shard=shards[int(name[5:10])], schema=schemas[0]).take_over()
            saved.append(len(rows))
        go.set()

    begin = Journal.__init__

    def noting(self: Journal, path: Path, *, shard: Shard, schema: Any) -> None:
        shards[int(path.name[5:10])] = shard
        begin(self, path, shard=shard, schema=schema)
        schemas.append(schema)

    shards: dict[int, Shard] = {}
    schemas: list[Any] = []
    waiting: list[list[str]] = []
    saved: list[int] = []
    monkeypatch.setattr(Journal, "__init__", noting)
    monkeypatch.setattr(Ledger, "commit", hold_up)
    looking = threading.Thread(target=look)
    looking.start()
    engine = scripted_engine(max_waiting=4)
    assert run_job(path, engine=engine).num_ok == 80
    looking.join()
    assert len(waiting[0]) == 3, "one is held up before it has a file, two wait, and one more is full and cannot be given"
    assert saved == [8, 8, 8]
    assert read_parts().equals(read_parts("whole"))


@pytest.mark.parametrize("error", [SystemExit(7), KeyboardInterrupt(), GeneratorExit()])
def test_what_ends_the_thread_ahead_ends_the_run(run_job, read_parts, write_jsonl, text_job, error: BaseException) -> None:
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(300)])
    run_job(path, out="whole")

    class Ending(type(text_job())):
        def request(self, record, *, prompt_token_ids):
            if record.row_key == "in.jsonl:200":
                raise error
            return super().request(record, prompt_token_ids=prompt_token_ids)

    if isinstance(error, KeyboardInterrupt):
        assert run_job(path, job=Ending(text_job().prompts)).stopped == "signal"
    else:
        with pytest.raises(type(error)) as caught:
            run_job(path, job=Ending(text_job().prompts))
        assert caught.value is error
    assert run_job(path).num_resumed >= 100
    assert read_parts().equals(read_parts("whole"))


@pytest.mark.parametrize("error", [OSError("the disk is gone"), ValueError("the rows are gone")])
def test_a_shard_that_cannot_be_read_ends_the_run(run_job, read_parts, write_jsonl, scripted_engine, monkeypatch, error: Exception) -> None:
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(100)])
    run_job(path, out="whole")

    class Failing:
        def __init__(self, reader: Any) -> None:
            self.schema, self.shards, self.reader = reader.schema, reader.shards, reader

        def read(self, shards: Any) -> Iterator[Any]:
            for number, rows in enumerate(self.reader.read(shards)):
                if number == 7:
                    raise error
                yield rows

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.runner.open_reader", lambda *arguments, **options: Failing(open_reader(*arguments, **options)))
        with pytest.raises(RunError, match="gone"):
            run_job(path, engine=scripted_engine(max_waiting=4))
    assert run_job(path).num_resumed > 0
    assert read_parts().equals(read_parts("whole"))


@pytest.mark.parametrize("number", [1, 4, 10])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_full_disk_ends_the_run_and_what_was_written_stays(
    run_job, read_parts, write_jsonl, tmp_path, monkeypatch, number: int, is_slow: bool
) -> None:
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(80)])
    run_job(path, out="whole")
    append, manifests = durable.append_lines, []

    def failing(target: Path, values: Any) -> None:
        manifests.append(target)
        time.sleep(0.02 * is_slow)
        if len(manifests) >= number:
            raise OSError(28, "No space left on device")
        append(target, values)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_lines", failing)
        with pytest.raises(RunError, match=r"^output\.path: .*No space left"):
            run_job(path)
    assert len(manifests) == number, "nothing is tried after that"
    kept = {part.name for part in (tmp_path / "out").glob("part-*.arrow")}
    assert len(kept) == number - 1
    for name in kept:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert run_job(path).num_resumed >= 8 * len(kept)
    assert read_parts().equals(read_parts("whole"))


@pytest.mark.parametrize("error", [OSError("the share is read-only"), ZeroDivisionError()])
def test_the_answers_to_a_shard_that_makes_no_part_are_kept(
    run_job, read_parts, write_jsonl, scripted_engine, monkeypatch, error: Exception
) -> None:
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(8)])
    run_job(path, out="whole")

    def fail(*arguments: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "write", fail)
        with pytest.raises(RunError if isinstance(error, OSError) else type(error)):
            run_job(path)
    again = scripted_engine()
    assert run_job(path, engine=again).num_resumed == 8
    assert again.asked == []
    assert read_parts().equals(read_parts("whole"))


@pytest.mark.parametrize("limit", ["deadline", "stop"])
def test_a_run_that_waits_for_its_input_can_be_stopped(run_job, write_jsonl, text_job, limit: str) -> None:
    asked = threading.Event()

    class Waiting(type(text_job())):
        def request(self, record, *, prompt_token_ids):
            asked.set()
            time.sleep(0.2)
            return super().request(record, prompt_token_ids=prompt_token_ids)

    began = time.monotonic()
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(100)])
    limits, stop = (Limits(deadline="1s"), lambda: False) if limit == "deadline" else (Limits(), asked.is_set)
    summary = run_job(path, job=Waiting(text_job().prompts), input={"rows_per_shard": 2}, limits=limits, stop=stop)
    assert summary.stopped == ("deadline" if limit == "deadline" else "signal")
    assert time.monotonic() - began < 3.0


def test_the_waiting_is_in_the_figures(run_job, write_jsonl, text_job, tmp_path) -> None:
    class Slow(type(text_job())):
        def request(self, record, *, prompt_token_ids):
            time.sleep(0.01)
            return super().request(record, prompt_token_ids=prompt_token_ids)

    run_job(write_jsonl([{"prompt": f"row {i}"} for i in range(32)]), job=Slow(text_job().prompts))
    split = json.loads((tmp_path / "out" / "metrics.json").read_text())["time_split"]
    assert split["tokenise"] > 0.3
    assert split["wait"] > 0.2


SLOW_DISK = """
import runpy, sys, time
conftest = runpy.run_path(sys.argv[1])
from engine import SamplingParams
from pipeline import InputOptions, Limits, OutputOptions, PromptOptions, Prompts, Provenance, TextJob, durable, run

append = durable.append_lines
durable.append_lines = lambda path, values: (time.sleep(float(sys.argv[4])), append(path, values))
run(
    TextJob(Prompts(conftest["ByteTokenizer"](), options=PromptOptions(), sampling=SamplingParams(), chat=False)),
    input=InputOptions(format="jsonl", path=sys.argv[2], rows_per_shard=8),
    output=OutputOptions(path=sys.argv[3]),
    provenance=Provenance(config={}, fingerprint={"model": "scripted"}, versions={}),
    load_engine=conftest["ScriptedEngine"],
    limits=Limits(stall_seconds=1),
    progress=False,
)
"""


@pytest.mark.parametrize(("seconds", "code"), [(0.8, 0), (9.0, 1)])
def test_a_slow_disk_is_no_hang_as_long_as_parts_come_out(write_jsonl, tmp_path, seconds: float, code: int) -> None:
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(40)])
    words = [sys.executable, "-c", SLOW_DISK, str(Path(__file__).with_name("conftest.py")), str(path), str(tmp_path / "out"), str(seconds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code, done.stderr

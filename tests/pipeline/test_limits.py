"""A run that ends early ends where its limit says, keeps what is answered, and the next one finishes the rest."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from engine import Request, SamplingParams
from pipeline import Limits
from pipeline.limits import Gate, parse_deadline
from pipeline.report import Metrics

NOW = datetime(2026, 3, 1, 22, 15, 30, tzinfo=timezone(timedelta(hours=1)))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("22:16", datetime(2026, 3, 1, 22, 16)),
        ("22:15", datetime(2026, 3, 2, 22, 15)),
        ("6:30", datetime(2026, 3, 2, 6, 30)),
        ("22:15:45", datetime(2026, 3, 1, 22, 15, 45)),
        ("2h30m", datetime(2026, 3, 2, 0, 45, 30)),
        ("1d 90s", datetime(2026, 3, 2, 22, 17)),
        ("2026-03-04T05:06", datetime(2026, 3, 4, 5, 6)),
        ("2026-03-04 05:06+03:00", datetime(2026, 3, 4, 3, 6)),
    ],
)
def test_a_deadline_is_the_moment_that_its_words_name(text: str, moment: datetime) -> None:
    assert parse_deadline(text, now=NOW) == moment.replace(tzinfo=NOW.tzinfo)


@pytest.mark.parametrize(
    ("text", "is_dated"), [("2999-03-01T06:30", True), ("06:30", False), ("2h30m", False), ("3600s", False), (None, False)]
)
def test_only_a_dated_deadline_never_comes_again(text: str | None, is_dated: bool) -> None:
    assert Limits(deadline=text).is_dated == is_dated


@pytest.mark.parametrize("text", ["", "soon", "25:00", "90", "2h30", "m", "2026-13-01", "06:30pm", "2025-01-01T00:00"])
def test_a_deadline_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^deadline: "):
        parse_deadline(text, now=NOW)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"max_rows": 0}, "max_rows"),
        ({"max_tokens_total": -1}, "max_tokens_total"),
        ({"max_error_rate": 1.1}, "max_error_rate"),
        ({"stall_seconds": 0}, "stall_seconds"),
        ({"deadline": "noon"}, "deadline"),
    ],
)
def test_a_limit_out_of_range_is_refused_by_name(values: dict, key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        Limits(**values)


ROWS = [{"id": i, "prompt": f"some words {i}"} for i in range(40)]


@pytest.mark.parametrize("count", [7, 8, 39])
def test_max_rows_answers_so_many_and_the_next_runs_go_on(run_job, write_jsonl, read_parts, scripted_engine, count: int) -> None:
    path = write_jsonl(ROWS)
    run_job(path, out="whole")
    done = 0
    while done < len(ROWS):
        engine = scripted_engine()
        summary = run_job(path, engine=engine, limits=Limits(max_rows=count))
        done += len(engine.asked)
        assert len(engine.asked) == min(count, len(ROWS) - summary.num_resumed)
        assert summary.num_unanswered == len(ROWS) - done
        assert summary.stopped == ("max_rows" if done < len(ROWS) else None)
    assert read_parts().equals(read_parts("whole"))


@pytest.mark.parametrize("budget", [150, 600, 2000, 10**6])
def test_a_token_budget_is_never_passed_and_nearly_used_up(run_job, write_jsonl, budget: int) -> None:
    path = write_jsonl(ROWS)
    most = max(len(row["prompt"]) for row in ROWS) + 16  # max_tokens is 16 by default
    summary = run_job(path, limits=Limits(max_tokens_total=budget))
    used = summary.metrics["prompt_tokens"] + summary.metrics["generated_tokens"]
    assert used <= budget
    if summary.stopped:
        assert summary.stopped == "max_tokens_total"
        assert used > budget - most
    else:
        assert summary.num_rows == len(ROWS)


def test_failures_stop_a_run_when_they_are_too_many(run_job, write_jsonl, read_parts) -> None:
    rows = [{"id": i, "prompt": "" if i % 5 == 0 else f"row {i}"} for i in range(400)]
    path = write_jsonl(rows)
    assert run_job(path, out="fine", limits=Limits(max_error_rate=0.25)).stopped is None
    summary = run_job(path, limits=Limits(max_error_rate=0.19))
    assert summary.stopped == "max_error_rate"
    assert 0 < summary.num_unanswered < 400
    assert run_job(path).num_resumed == 400 - summary.num_unanswered
    assert read_parts().equals(read_parts("fine"))


def test_failures_are_told_where_no_part_is_finished(run_job, write_jsonl) -> None:
    """The errors wait with their rows for the rest of the part, so only the counts of the run say what went wrong."""
    rows = [{"id": i, "prompt": "" if i % 2 else "too long" * 1000 if i % 16 == 0 else f"row {i}"} for i in range(300)]
    summary = run_job(write_jsonl(rows), limits=Limits(max_error_rate=0.1), input={"rows_per_shard": 300})
    assert (summary.stopped, summary.num_rows, summary.num_errors) == ("max_error_rate", 0, 0)
    assert summary.num_taken == 100, "from so many rows on"
    empty = [f"in.jsonl:{i}" for i, row in enumerate(rows[:100]) if not row["prompt"]]
    assert next(iter(summary.failures)) == "empty_prompt"
    assert summary.failures["empty_prompt"].num_rows == len(empty)
    assert list(summary.failures["empty_prompt"].first) == empty[:5]
    assert summary.metrics["rows_failed_by_code"] == {code: failures.num_rows for code, failures in summary.failures.items()}


def test_few_rows_are_no_rate(run_job, write_jsonl) -> None:
    summary = run_job(write_jsonl([{"prompt": ""} for _ in range(99)]), limits=Limits(max_error_rate=0.0))
    assert (summary.stopped, summary.num_errors) == (None, 99)


def test_bad_rows_that_are_found_first_are_no_reason_to_stop(run_job, write_jsonl, scripted_engine) -> None:
    """Bad rows fail while the good ones beside them still run: they count against all rows that were looked at."""
    rows = [{"id": i, "prompt": "" if i % 20 == 0 else f"row {i}"} for i in range(1000)]
    summary = run_job(
        write_jsonl(rows), engine=scripted_engine(max_waiting=500), limits=Limits(max_error_rate=0.06), input={"rows_per_shard": 256}
    )
    assert summary.stopped is None


def test_a_deadline_ends_a_run_in_time_and_the_next_one_goes_on(run_job, write_jsonl, read_parts, scripted_engine) -> None:
    class Steady(scripted_engine):
        def generate(self, requests):
            for completion in super().generate(requests):
                time.sleep(0.01)
                yield completion

    path = write_jsonl([{"prompt": f"row {i}"} for i in range(400)])
    began = time.monotonic()
    summary = run_job(path, engine=Steady(), limits=Limits(deadline="1s"))
    assert summary.stopped == "deadline"
    assert time.monotonic() - began < 1.5
    assert 20 < summary.num_rows + summary.num_waiting < 110
    assert summary.num_done == summary.num_rows + summary.num_waiting
    again = run_job(path)
    assert again.num_done == 400 - summary.num_done
    assert again.num_resumed == summary.num_rows + summary.num_waiting
    assert again.num_rows == 400


def test_near_the_deadline_only_rows_that_can_be_done_are_taken(scripted_engine) -> None:
    """Rows are admitted as long as they and those in flight fit into the time left, at the speed so far."""
    metrics = Metrics(rows_total=1000, rows_resumed=0)
    metrics.loaded(scripted_engine().stats)
    gate = Gate(Limits(deadline="2s"), metrics=metrics, stop=lambda: False)
    request = Request(id=0, prompt_token_ids=[1], sampling=SamplingParams())
    assert gate.admits(request, num_in_flight=500), "nothing is known yet"
    time.sleep(0.5)
    metrics.rows_asked = 110  # ten are done in half a second: 20 a second, 30 more until the deadline
    metrics.rows_done = 10
    assert not gate.admits(request, num_in_flight=100)
    assert gate.stopped is None, "it may go better than that"
    metrics.rows_asked = 30
    assert gate.admits(request, num_in_flight=20)


CHANGING = """
import time
from pipeline.watchdog import Watchdog

def state():
    raise RuntimeError("dictionary changed size during iteration")

with Watchdog(0.1, state=state):
    time.sleep(20)
"""


def test_a_watchdog_acts_even_where_it_cannot_tell_what_the_run_is_at() -> None:
    done = subprocess.run([sys.executable, "-c", CHANGING], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1, done.stderr
    assert "no step has finished for 0.1 s (stall_seconds)" in done.stderr
    assert "the engine hangs" in done.stderr


HANG = """
import runpy, sys, time
from pathlib import Path
conftest = runpy.run_path(sys.argv[1])
from engine import SamplingParams
from pipeline import InputOptions, Limits, OutputOptions, PromptOptions, Prompts, Provenance, TextJob, run

class Hanging(conftest["ScriptedEngine"]):
    def generate(self, requests):
        for number, completion in enumerate(super().generate(requests)):
            yield completion
            if number == 20:
                time.sleep(60)

run(
    TextJob(Prompts(conftest["ByteTokenizer"](), options=PromptOptions(), sampling=SamplingParams(), chat=False)),
    input=InputOptions(format="jsonl", path=sys.argv[2], rows_per_shard=8),
    output=OutputOptions(path=sys.argv[3]),
    provenance=Provenance(config={}, fingerprint={"model": "scripted"}, versions={}),
    load_engine=Hanging,
    limits=Limits(stall_seconds=4),
    progress=False,
)
"""


def test_an_engine_that_hangs_is_named_and_ends_the_process(run_job, write_jsonl, tmp_path: Path) -> None:
    path = write_jsonl(ROWS)
    words = [sys.executable, "-c", HANG, str(Path(__file__).with_name("conftest.py")), str(path), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1, done.stderr
    assert "no step has finished for 4 s (stall_seconds)" in done.stderr
    assert "rows are in flight, the oldest is in.jsonl:" in done.stderr
    assert "in generate" in done.stderr, "it says where"
    summary = run_job(path)
    assert summary.num_rows == 40
    assert summary.num_resumed > 0

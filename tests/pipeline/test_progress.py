"""Progress and metrics: the numbers add up, a log stays readable, silence is silence."""

from __future__ import annotations

import io
import json
import re
import time

import pytest

from engine import Completion
from pipeline.progress import Progress
from pipeline.report import Metrics, process_seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def done(metrics: Metrics, progress: Progress, *, rows: int) -> None:
    for _ in range(rows):
        metrics.finished([Completion(request_id=0, token_ids=(1, 2), finish_reason="stop", num_prompt_tokens=10, num_cached_tokens=4)])
        progress.update()


def test_a_log_gets_a_first_and_a_last_line_and_few_between(scripted_engine) -> None:
    stream = io.StringIO()
    metrics = Metrics(rows_total=100, rows_resumed=20)
    progress = Progress(metrics, stream=stream)
    metrics.loaded(scripted_engine().stats)
    progress.start()
    done(metrics, progress, rows=80)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("20/100 rows (20%)")
    assert re.fullmatch(r"100/100 rows \(100%\), [\d.]+ rows/s, \d+ tokens/s, prefix hits 40%, KV pool 25%, time left 00:00", lines[1])


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    metrics = Metrics(rows_total=10, rows_resumed=0)
    progress = Progress(metrics, stream=stream)
    progress.start()
    start = time.monotonic()
    for row in range(10):
        monkeypatch.setattr(time, "monotonic", lambda now=start + 4 * (row + 1): now)
        done(metrics, progress, rows=1)
    assert [line.split("/")[0] for line in stream.getvalue().splitlines()] == ["0", "3", "6", "9"]


def test_a_terminal_gets_a_bar(scripted_engine) -> None:
    stream = Terminal()
    metrics = Metrics(rows_total=10, rows_resumed=0)
    metrics.loaded(scripted_engine().stats)
    progress = Progress(metrics, stream=stream)
    progress.start()
    done(metrics, progress, rows=10)
    progress.close()
    assert "10/10" in stream.getvalue()
    assert "prefix hits 40%" in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_off_is_silent(stream: io.StringIO) -> None:
    metrics = Metrics(rows_total=10, rows_resumed=0)
    progress = Progress(metrics, enabled=False, stream=stream)
    progress.start()
    done(metrics, progress, rows=10)
    progress.close()
    assert stream.getvalue() == ""


def test_metrics_add_up(run_job, read_parts, write_jsonl, tmp_path) -> None:
    rows = [{"prompt": "word " * (i % 7)} for i in range(30)]
    before = process_seconds()
    summary = run_job(write_jsonl(rows))
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics == summary.metrics
    table = read_parts()
    for name, column in (("prompt_tokens", "num_prompt_tokens"), ("generated_tokens", "num_generated_tokens")):
        assert metrics[name] == sum(value or 0 for value in table[column].to_pylist())
    assert (metrics["rows"], metrics["rows_ok"], metrics["rows_error"]) == (30, 25, 5)
    assert metrics["prompt_tokens"] == metrics["cached_prompt_tokens"] + metrics["computed_prompt_tokens"]
    assert metrics["prefix_hit_rate"] == metrics["cached_prompt_tokens"] / metrics["prompt_tokens"]
    assert before <= metrics["load_s"] <= metrics["first_row_s"] <= metrics["wall_s"] <= process_seconds()
    assert summary.num_cut == table["finish_reason"].to_pylist().count("length") > 0
    assert set(metrics["time_split"]) == {"read", "tokenise", "wait", "write", "forward"}
    assert metrics["peak_rss_bytes"] > 10_000_000

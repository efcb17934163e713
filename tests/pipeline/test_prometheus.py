"""The metrics file as Prometheus reads it: names, types, numbers that follow the run, and never half a file."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import Completion
from pipeline import Limits, MetricsOptions, PrometheusFile
from pipeline.report import Metrics

ENGINE_NUMBERS = {
    "steps": 5,
    "preemptions": 2,
    "recomputed_tokens": 30,
    "peak_device_bytes": 8192,
    "kv_bytes": 4096,
    "kv_blocks_used": 3,
    "kv_blocks_cached": 4,
    "kv_blocks_free": 9,
    "kv_blocks_peak": 7,
    "kv_utilisation": 0.75,
    "kv_fragmentation": 0.25,
    "sequences_running": 2,
    "sequences_waiting": 11,
    "batch_size_mean": 1.5,
    "prefix_hit_rate": 0.5,
    "time_to_first_token_s": {"count": 4, "mean": 0.5, "p50": 0.25, "p99": 1.25},
    "time_split": {"forward": 1.5},
}


class Numbers:
    pool_use = 0.0

    def snapshot(self) -> dict:
        return ENGINE_NUMBERS


def samples(path) -> dict[tuple[str, frozenset], float]:
    """Every sample of the file: (name, labels but run) -> value. The parser fails on what is not in the format."""
    found = {}
    for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == 'sh"or\\t\nrun'
            key = (sample.name, frozenset(labels.items()))
            assert key not in found, "twice the same metric"
            found[key] = sample.value
    return found


def value(found, name, **labels) -> float:
    return found["pagemill_" + name, frozenset(labels.items())]


@pytest.fixture
def file(tmp_path) -> PrometheusFile:
    return PrometheusFile(str(tmp_path / "run.prom"), run='sh"or\\t\nrun', info={"task": "chat"})


def test_every_number_is_there_under_its_name(file, tmp_path):
    metrics = Metrics(rows_total=10, rows_resumed=7)
    with file.following(metrics):
        before = samples(tmp_path / "run.prom")
        assert value(before, "run_complete") == 0 and value(before, "input_rows") == 10
        assert ("pagemill_kv_pool_bytes", frozenset()) not in before, "no engine yet"
        metrics.loaded(Numbers())
        for index in range(3):
            metrics.finished(
                [Completion(request_id=index, token_ids=(1, 2), finish_reason="stop", num_prompt_tokens=10, num_cached_tokens=4)]
            )
        metrics.failures.count("empty_prompt", row_key="in.jsonl:0")
    after = samples(tmp_path / "run.prom")
    assert value(after, "run_complete") == 1
    assert value(after, "run_end_timestamp_seconds") == pytest.approx(time.time(), abs=60)
    assert value(after, "run_info", task="chat") == 1
    assert (value(after, "rows_total", status="ok"), value(after, "rows_total", status="error")) == (2, 1)
    assert (value(after, "resumed_rows"), value(after, "generated_tokens_total")) == (7, 6)
    assert (value(after, "prompt_tokens_total"), value(after, "cached_prompt_tokens_total")) == (30, 12)
    assert [value(after, "kv_blocks", state=state) for state in ("used", "cached", "free")] == [3, 4, 9]
    assert [value(after, "sequences", state=state) for state in ("running", "waiting")] == [2, 11]
    assert (value(after, "kv_utilisation_ratio"), value(after, "kv_fragmentation_ratio")) == (0.75, 0.25)
    assert (value(after, "kv_pool_bytes"), value(after, "peak_device_memory_bytes")) == (4096, 8192)
    assert (value(after, "prefix_hit_ratio"), value(after, "preemptions_total")) == (0.5, 2)
    first = "time_to_first_token_seconds"
    assert [value(after, first, quantile=q) for q in ("0.5", "0.99")] == [0.25, 1.25]
    assert (value(after, first + "_count"), value(after, first + "_sum")) == (4, 2.0)
    assert value(after, "stage_seconds_total", stage="forward") == 1.5


def test_names_keep_to_the_conventions(file, tmp_path):
    """The rules of `promtool check metrics`, on the file's own text."""
    metrics = Metrics(rows_total=1, rows_resumed=0)
    with file.following(metrics):
        metrics.loaded(Numbers())
    text = (tmp_path / "run.prom").read_text(encoding="utf-8")
    families = list(text_string_to_metric_families(text))
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, flags=re.MULTILINE))
    assert types.keys() == helps.keys() and len(types) == len(families) > 15, "each has a type and a text, once"
    for name, kind in types.items():
        assert re.fullmatch(r"pagemill_[a-z][a-z0-9_]*[a-z0-9]", name)
        assert name.endswith("_total") == (kind == "counter")
        assert kind == "summary" or not name.endswith(("_count", "_sum", "_bucket"))
        assert not re.search(r"_(ms|s|milliseconds|minutes|mib|kb|percent|rate|gauge|counter|summary)(_|$)", name), "base units, no types"
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    assert not labels & {"job", "instance"}, "Prometheus sets these itself"


def test_a_reader_never_finds_half_a_file(file, tmp_path):
    metrics = Metrics(rows_total=1, rows_resumed=0)
    over = threading.Event()
    torn, num_reads = [], 0

    def write():
        while not over.is_set():
            file._write()

    with file.following(metrics):
        metrics.loaded(Numbers())
        file._write()
        size = len((tmp_path / "run.prom").read_text().splitlines())
        thread = threading.Thread(target=write)
        thread.start()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            text = (tmp_path / "run.prom").read_text(encoding="utf-8")
            num_reads += 1
            if len(text.splitlines()) != size or not text.endswith("\n"):
                torn.append(text)
        over.set()
        thread.join()
    assert num_reads > 20 and not torn
    assert [path.name for path in tmp_path.iterdir()] == ["run.prom"], "nothing is left lying about"


def test_the_file_follows_the_run(run_job, write_jsonl, scripted_engine, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.prometheus.REFRESH_SECONDS", 0.0)
    seen = []

    class Watched(scripted_engine):
        def order(self, waiting):
            seen.append(value(samples(tmp_path / "run.prom"), "rows_total", status="ok"))
            return super().order(waiting)

    def load():
        assert value(samples(tmp_path / "run.prom"), "input_rows") == 40, "there before the load"
        return Watched(max_waiting=8)

    file = PrometheusFile(str(tmp_path / "run.prom"), run='sh"or\\t\nrun', info={})
    summary = run_job(write_jsonl([{"prompt": f"row {i}"} for i in range(40)]), load_engine=load, prometheus=file)
    assert seen == sorted(seen) and len(set(seen)) > 5
    found = samples(tmp_path / "run.prom")
    assert value(found, "rows_total", status="ok") == 40 == summary.num_ok
    assert value(found, "prompt_tokens_total") == json.loads((tmp_path / "out" / "metrics.json").read_text())["prompt_tokens"]
    assert value(found, "run_complete") == 1


def test_seconds_of_all_threads_follow_the_run(run_job, write_jsonl, scripted_engine, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.prometheus.REFRESH_SECONDS", 0.0)
    stages = ("read", "tokenise", "write")
    seen = []

    class Watched(scripted_engine):
        def order(self, waiting):
            found = samples(tmp_path / "run.prom")
            seen.append([value(found, "stage_seconds_total", stage=stage) for stage in stages])
            return super().order(waiting)

    file = PrometheusFile(str(tmp_path / "run.prom"), run='sh"or\\t\nrun', info={})
    summary = run_job(write_jsonl([{"prompt": f"row {i}"} for i in range(4000)]), engine=Watched(max_waiting=500), prometheus=file)
    assert all(earlier[stage] <= later[stage] for earlier, later in pairwise(seen) for stage in range(len(stages)))
    split = summary.metrics["time_split"]
    assert all(0 < now <= split[stage] for now, stage in zip(seen[-1], stages, strict=True)), "the rows still ran"


@pytest.mark.parametrize("how", ["limit", "fault"])
def test_a_run_that_stops_early_is_not_complete(run_job, write_jsonl, scripted_engine, tmp_path, file, how):
    rows = write_jsonl([{"prompt": f"row {i}"} for i in range(40)])
    if how == "limit":
        run_job(rows, limits=Limits(max_rows=10), prometheus=file)
    else:
        with pytest.raises(RuntimeError):
            run_job(rows, engine=scripted_engine(fail_after=10), prometheus=file)
    found = samples(tmp_path / "run.prom")
    assert value(found, "run_complete") == 0
    assert 0 < value(found, "rows_total", status="ok") < 40
    again = PrometheusFile(str(tmp_path / "run.prom"), run='sh"or\\t\nrun', info={})
    run_job(rows, prometheus=again)
    assert value(samples(tmp_path / "run.prom"), "run_complete") == 1
    run_job(rows, prometheus=again, load_engine=lambda: pytest.fail("nothing is left to do"))
    assert value(samples(tmp_path / "run.prom"), "resumed_rows") == 40


@pytest.mark.parametrize("path", ["metrics.txt", "/tmp/.prom", "s3://bucket/run.prom", ""])
def test_another_name_is_refused(path):
    with pytest.raises(ValueError, match=r"metrics\.prometheus: .*\.prom"):
        MetricsOptions(prometheus=path)


def test_a_missing_folder_is_refused_by_the_key(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.prometheus: there is no folder .*nowhere"):
        PrometheusFile(str(tmp_path / "nowhere" / "run.prom"), run="r", info={})


def test_a_path_that_cannot_be_written_is_refused_before_the_load(run_job, write_jsonl, tmp_path):
    (tmp_path / "run.prom").mkdir()
    file = PrometheusFile(str(tmp_path / "run.prom"), run="r", info={})
    with pytest.raises(ValueError, match=r"metrics\.prometheus: .* cannot be written"):
        run_job(write_jsonl([{"prompt": "a"}]), prometheus=file, load_engine=lambda: pytest.fail("loaded"))


def test_two_runs_do_not_write_one_file(run_job, write_jsonl, scripted_engine, tmp_path):
    rows = write_jsonl([{"prompt": f"row {i}"} for i in range(4)])
    first, second = (PrometheusFile(str(tmp_path / "run.prom"), run='sh"or\\t\nrun', info={}) for _ in range(2))

    def load():
        before = (tmp_path / "run.prom").read_bytes()
        with pytest.raises(ValueError, match=r"metrics\.prometheus: .*run\.prom' is in use by process .* use another file"):
            run_job(rows, out="second", prometheus=second, load_engine=lambda: pytest.fail("loaded"))
        assert (tmp_path / "run.prom").read_bytes() == before
        assert [path.name for path in tmp_path.glob("*.prom")] == ["run.prom"], "node_exporter would read the lock"
        return scripted_engine()

    assert run_job(rows, out="first", prometheus=first, load_engine=load).num_ok == 4
    assert run_job(rows, out="second", prometheus=second).num_ok == 4, "the first one is over"
    assert not list(tmp_path.glob("run.prom?*"))


def test_a_disk_that_goes_away_ends_no_run(run_job, write_jsonl, scripted_engine, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("pipeline.prometheus.REFRESH_SECONDS", 0.0)
    folder = tmp_path / "textfile"
    folder.mkdir()

    def load():
        shutil.rmtree(folder)
        return scripted_engine()

    file = PrometheusFile(str(folder / "run.prom"), run="r", info={})
    summary = run_job(write_jsonl([{"prompt": f"row {i}"} for i in range(40)]), prometheus=file, load_engine=load)
    assert summary.num_ok == 40
    assert sum("metrics.prometheus" in record.getMessage() for record in caplog.records) == 1, "it warns once"

"""`pagemill bench` as a user starts it: lines whose figures agree with each other, fresh processes, clean ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams, Tokenizer
from engine.config import ModelConfig
from jobs._app import compose
from jobs._bench import point
from jobs._bench.config import BenchConfig
from jobs._bench.workload import synthetic
from jobs.bench import Crash, run_apart

SHAPE = ["bench.rows=5", "bench.prompt_tokens=40-60", "bench.shared_tokens=32", "bench.max_tokens=2-6"]
SMALL = [*SHAPE, "engine.threads=1", "kv_cache.num_blocks=64"]


def checked(line: dict[str, Any]) -> dict[str, Any]:
    """What must hold in every line, whatever was measured."""
    run_s = line["wall_s"] - line["load_s"]
    assert line["cached_prompt_tokens"] + line["computed_prompt_tokens"] == line["prompt_tokens"]
    assert line["prefix_hit_rate"] == pytest.approx(line["cached_prompt_tokens"] / line["prompt_tokens"])
    assert line["generated_tokens_per_s"] == pytest.approx(line["generated_tokens"] / run_s)
    assert line["total_tokens_per_s"] == pytest.approx((line["prompt_tokens"] + line["generated_tokens"]) / run_s)
    assert line["prefill_tokens"] == line["computed_prompt_tokens"] + line["recomputed_tokens"]
    assert line["decode_tokens"] == line["generated_tokens"] - line["rows"]
    assert line["prefill_tokens_per_s"] == pytest.approx(line["prefill_tokens"] / line["prefill_s"])
    assert line["decode_tokens_per_s"] == pytest.approx(line["decode_tokens"] / line["decode_s"])
    assert line["prefill_s"] + line["decode_s"] <= run_s * (1 + 1e-9)
    assert 0 < line["load_s"] < line["first_row_s"] <= line["wall_s"]
    assert line["kv_blocks_peak"] <= line["kv_blocks_total"]
    assert line["kv_bytes_peak"] == pytest.approx(line["kv_bytes"] * line["kv_blocks_peak"] / line["kv_blocks_total"])
    assert line["batch_size_mean"] <= line["batch_size_peak"] <= min(line["rows"], line["settings"]["engine.max_num_seqs"])
    assert line["first_row_s"] - line["load_s"] <= line["answer_s_median"] <= run_s
    held_bytes = line["kv_bytes"] / line["kv_blocks_total"] * line["kv_blocks_peak"]  # of a pool that is mapped as it is written
    assert line["peak_rss_bytes"] > held_bytes and line["peak_device_bytes"] is None
    assert {"schedule", "forward", "tokenise"} <= set(line["time_split"])
    assert line["machine"]["usable_cpus"] >= 1 and line["machine"]["memory_bytes"] > line["peak_rss_bytes"]
    rates = line["generated_tokens_per_s_runs"]
    assert len(rates) == line["repeat"] and line["generated_tokens_per_s_best"] == max(rates)
    assert line["generated_tokens_per_s"] == sorted(rates)[len(rates) // 2]
    return line


def test_a_sweep_is_measured_in_fresh_processes(pagemill: Any, tiny_model: str, tmp_path: Path) -> None:
    start = time.monotonic()
    sweep = ["-m", "engine.max_num_seqs=2,4", "bench.repeat=2", "bench.roof=false", "bench.output=lines.jsonl"]
    done = pagemill("bench", f"model.path={tiny_model}", *SMALL, *sweep)
    elapsed = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    lines = [checked(json.loads(line)) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line["point"] for line in lines] == [{"engine.max_num_seqs": "2"}, {"engine.max_num_seqs": "4"}]
    assert [line["settings"]["engine.max_num_seqs"] for line in lines] == [2, 4]
    assert [line["repeat"] for line in lines] == [2, 2]

    vocab_size = Tokenizer.load(ModelConfig(path=tiny_model)).vocab_size
    config = compose("bench", SHAPE, kind=BenchConfig)
    asked = list(synthetic(config.bench, vocab_size=vocab_size, sampling=SamplingParams(), seed=config.seed))
    for line in lines:
        assert line["rows"] == len(asked)
        assert line["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in asked)
        assert line["generated_tokens"] == sum(request.sampling.max_tokens for request in asked)
        assert line["cached_prompt_tokens"] == 32 * (len(asked) - 1)  # two blocks, computed once: no run saw another's cache
        assert line["batch_size_mean"] <= line["settings"]["engine.max_num_seqs"]
        assert line["roof"] is None
    # wall_s is from a process's start, so in one process the later ones would hold the earlier ones too.
    assert sum(line["load_s_median"] * line["repeat"] for line in lines) < elapsed

    assert done.stderr.count("pagemill: point ") == 4
    table = [row.strip("| ").split("|") for row in done.stdout.splitlines() if row.startswith("|")]
    assert [cells[0].strip() for cells in table[2:]] == ["2", "4"]
    shown = {heading.strip(): cell.strip() for heading, cell in zip(table[0], table[2], strict=True)}
    assert shown["best"] == f"{lines[0]['generated_tokens_per_s_best']:,.0f}"


def test_one_point_prints_its_line_and_its_share_of_the_roof(pagemill: Any, tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("raise SystemExit('the wrong package was imported')")
    done = pagemill("bench", f"model.path={tiny_model}", *SMALL, "model.dtype=float32", "kv_cache.block_size=8")
    assert done.returncode == 0, done.stderr
    line = checked(json.loads(done.stdout))
    assert line["point"] == {} and line["repeat"] == 1 and line["settings"]["model.dtype"] == "float32"
    roof = line["roof"]
    assert roof["flops_share"] == pytest.approx(line["model_flops_per_s"] / roof["flops_per_s"])
    assert roof["read_share"] == pytest.approx(line["model_read_bytes_per_s"] / roof["read_bytes_per_s"])
    assert max(roof["flops_share"], roof["read_share"]) <= roof["share"] * (1 + 1e-9) <= roof["flops_share"] + roof["read_share"] + 1e-9
    # Two layers of q, k and v, and of o, gate, up and down, which the second needs where a token is drawn; a head of as many
    # rows as there are tokens; float32 keys and values.
    qkv, rest, head = 32 * 64, 32 * 32 + 3 * 32 * 64, 32 * Tokenizer.load(ModelConfig(path=tiny_model)).vocab_size
    run_s = line["wall_s"] - line["load_s"]
    computed, drawn = line["prefill_tokens"] + line["decode_tokens"], line["generated_tokens"]
    products = 2 * ((2 * qkv + rest) * computed + (rest + head) * drawn)
    longest = 2 * 4 * 4 * 8 * 66 * computed  # attention over 60 + 6 positions at most
    assert products < line["model_flops_per_s"] * run_s < products + longest
    weights = 4 * (2 * qkv + 2 * rest + head) * line["steps"]
    kv = line["kv_bytes"] / line["kv_blocks_total"] / 8 * 5 * 66 * line["steps"]
    assert 4 * (2 * qkv + rest) * line["steps"] < line["model_read_bytes_per_s"] * run_s <= weights + kv
    assert [path.name for path in tmp_path.rglob("*")] == ["jobs", "__init__.py"]


def test_a_workload_file_brings_its_own_lengths(pagemill: Any, tiny_model: str, tmp_path: Path) -> None:
    rows = [{"prompt_token_ids": [5] * 9, "sampling_params": {"max_tokens": tokens, "ignore_eos": True}} for tokens in (2, 7)]
    (tmp_path / "load.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = pagemill("bench", f"model.path={tiny_model}", "engine.threads=1", "input.path=load.jsonl", "bench.roof=false")
    assert done.returncode == 0, done.stderr
    line = checked(json.loads(done.stdout))
    assert (line["rows"], line["workload"], line["prompt_tokens"], line["generated_tokens"]) == (2, "load.jsonl", 18, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["load.jsonl"]


def test_what_prompts_share_is_kept_for_the_next_measurement(pagemill: Any, tiny_model: str) -> None:
    cached = []
    for _ in range(2):
        done = pagemill("bench", f"model.path={tiny_model}", *SMALL, "bench.roof=false", "kv_cache.persist=kv")
        assert done.returncode == 0, done.stderr
        cached.append(checked(json.loads(done.stdout))["cached_prompt_tokens"])
    assert cached == [32 * 4, 32 * 5]


def test_a_point_that_is_refused_leaves_the_others(pagemill: Any, tiny_model: str) -> None:
    words = [f"model.path={tiny_model}", *SHAPE, "engine.threads=1", "bench.roof=false", "kv_cache.num_blocks=64,1"]
    done = pagemill("bench", *words)
    assert done.returncode == 3, done.stderr
    good, bad = map(json.loads, done.stdout.splitlines())
    checked(good)
    assert bad["point"] == {"kv_cache.num_blocks": "1"}
    assert bad["error"].startswith("bench.prompt_tokens: prompts and answers of 66 tokens do not fit into the ")
    assert "failed" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("key", "length"), [("bench.prompt_tokens", 100_000_000), ("bench.max_tokens", 1000)])
def test_lengths_that_cannot_fit_are_refused_before_a_prompt_is_made(
    tiny_model: str, key: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point, "synthetic", lambda *_, **__: pytest.fail("it would take minutes, and gigabytes"))
    config = compose("bench", [f"model.path={tiny_model}", f"{key}={length}"], kind=BenchConfig)
    with pytest.raises(ValueError, match=rf"^{key}: .* do not fit into the 1024 that"):
        point.measure(config)


def test_a_single_point_that_is_refused_is_one_line(pagemill: Any, tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": 7}\n')
    done = pagemill("bench", f"model.path={tiny_model}", "input.path=bad.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and "bad.jsonl:0: " in done.stderr


def test_an_output_that_cannot_be_written_is_told_before_the_work(pagemill: Any, tiny_model: str) -> None:
    done = pagemill("bench", f"model.path={tiny_model}", "bench.output=no/such/folder.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pagemill: bench.output: no/such/folder.jsonl cannot be written (No such file or directory)\n"


def test_a_run_that_is_killed_is_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impostor = tmp_path / "python"
    impostor.write_text("#!/bin/sh\nkill -9 $$\n")
    impostor.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(impostor))
    with pytest.raises(Crash, match="SIGKILL, which Linux sends where memory runs out"):
        run_apart([])


def started(command: str, tiny_model: str, folder: Path, *words: str) -> subprocess.Popen[str]:
    """A benchmark whose first run is in progress."""
    process = subprocess.Popen(
        [command, "bench", f"model.path={tiny_model}", *SMALL, "bench.roof=false", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("pagemill: point 1 of 2, run 1 of 2")
    return process


def test_a_signal_keeps_what_is_measured(command: str, tiny_model: str, tmp_path: Path) -> None:
    process = started(command, tiny_model, tmp_path, "engine.max_num_seqs=2,4", "bench.repeat=2")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    (line,) = map(json.loads, out.splitlines())
    assert checked(line)["repeat"] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the process in /proc")
def test_no_run_outlives_the_command(command: str, tiny_model: str, tmp_path: Path) -> None:
    long = ["bench.rows=5000", "bench.max_tokens=300"]  # minutes
    process = started(command, tiny_model, tmp_path, "engine.max_num_seqs=2,4", "bench.repeat=2", *long)
    children: list[str] = []
    while not children:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < deadline, "the run goes on"
        time.sleep(0.1)

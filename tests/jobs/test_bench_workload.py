"""The synthetic workload has the shape that it was asked for, and the measured counts are the engine's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jobs._app import compose
from jobs.bench import BenchConfig, Workload, synthetic


@given(rows=st.integers(1, 20), shared=st.integers(0, 40), own=st.integers(1, 40), max_tokens=st.integers(1, 9), seed=st.integers(0, 9))
def test_synthetic_workload_has_its_shape(rows: int, shared: int, own: int, max_tokens: int, seed: int) -> None:
    workload = Workload(rows=rows, prompt_tokens=shared + own, shared_tokens=shared, max_tokens=max_tokens)
    vocabulary = SimpleNamespace(vocab_size=50)
    requests = list(synthetic(workload, vocabulary, seed=seed))
    assert len(requests) == rows == len({request.id for request in requests})
    assert len({tuple(request.prompt_token_ids[:shared]) for request in requests}) == 1
    assert all(len(request.prompt_token_ids) == shared + own for request in requests)
    assert all(0 <= token < 50 for request in requests for token in request.prompt_token_ids)
    assert all(request.sampling.max_tokens == max_tokens and request.sampling.ignore_eos for request in requests)
    assert requests == list(synthetic(workload, vocabulary, seed=seed))


def test_impossible_workload_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bench\.shared_tokens: 256 is not in 0\.\.255"):
        compose("bench", ["bench.shared_tokens=256"], kind=BenchConfig)
    with pytest.raises(ValueError, match=r"bench\.rows: 0 must be 1 or more"):
        compose("bench", ["bench.rows=0"], kind=BenchConfig)


def test_bench_has_no_output_keys() -> None:
    with pytest.raises(ValueError, match="output: unknown key"):
        compose("bench", ["output.path=x"], kind=BenchConfig)


def test_bench_prints_one_json_line(pagemill: Any, tiny_model: str) -> None:
    shape = ["bench.rows=3", "bench.prompt_tokens=40", "bench.shared_tokens=32", "bench.max_tokens=2", "kv_cache.num_blocks=64"]
    done = pagemill("bench", f"model.path={tiny_model}", "engine.threads=1", *shape)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert (numbers["rows"], numbers["prompt_tokens"], numbers["generated_tokens"]) == (3, 120, 6)
    assert numbers["computed_prompt_tokens"] == 120 - 2 * 32  # two rows share two blocks of 16 tokens
    assert numbers["generated_tokens_per_s"] == pytest.approx(6 / numbers["run_s"])


def test_bench_takes_a_workload_file(pagemill: Any, tiny_model: str, tmp_path: Path) -> None:
    rows = [{"prompt_token_ids": [5] * 9, "sampling_params": {"max_tokens": tokens, "ignore_eos": True}} for tokens in (2, 7)]
    (tmp_path / "load.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = pagemill("bench", f"model.path={tiny_model}", "engine.threads=1", "input.path=load.jsonl")
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout)
    assert (numbers["rows"], numbers["workload"], numbers["prompt_tokens"], numbers["generated_tokens"]) == (2, "load.jsonl", 18, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["load.jsonl"]

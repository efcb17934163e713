"""`pagemill bench`: how fast this machine answers a workload; one JSON line on stdout, a table on stderr.

A workload is a file of rows or a synthetic one with a shared prefix. Nothing is written.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams, Tokenizer
from jobs._app import OK, compose, guarded, make_job
from jobs._provenance import dtype_name
from jobs._schema import JobOptions, absolute, as_yaml
from jobs._terminal import tell
from pipeline import InputOptions, PromptOptions
from pipeline.reader import open_reader
from pipeline.report import peak_rss_bytes, process_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A synthetic workload: ``rows`` prompts of ``prompt_tokens`` random tokens, the first ``shared_tokens`` equal in all,
    each answered with exactly ``max_tokens`` tokens."""

    rows: int
    prompt_tokens: int
    shared_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        for key in ("rows", "max_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"bench.{key}: {getattr(self, key)} must be 1 or more")
        if not 0 <= self.shared_tokens < self.prompt_tokens:
            raise ValueError(f"bench.shared_tokens: {self.shared_tokens} is not in 0..{self.prompt_tokens - 1}, under bench.prompt_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The keys of ``conf/bench.yaml``. An empty ``input.path`` asks for the synthetic workload."""

    model: ModelConfig
    engine: EngineConfig
    kv_cache: KVCacheConfig
    sampling: SamplingParams
    prompt: PromptOptions
    input: InputOptions
    job: JobOptions
    bench: Workload
    seed: int
    limit: int | None = None


def main(overrides: list[str], *, show: bool) -> int:
    """Measure and print; with ``show`` print the configuration instead."""
    return guarded(lambda: _bench(overrides, show=show))


def _bench(overrides: list[str], *, show: bool) -> int:
    config = compose("bench", overrides, kind=BenchConfig)
    if show:
        tell(as_yaml(config))
        return OK
    tokenizer = Tokenizer.load(config.model)
    requests = list(_from_file(config, tokenizer) if config.input.path else synthetic(config.bench, tokenizer, seed=config.seed))
    engine = Engine.from_config(model=config.model, engine=config.engine, kv_cache=config.kv_cache, tokenizer=tokenizer)
    numbers = _machine() | _settings(config) | measure(engine, requests)
    for key, value in numbers.items():
        print(f"{key:<26}{value:,.3f}" if isinstance(value, float) else f"{key:<26}{value}", file=sys.stderr)
    tell(json.dumps(numbers))
    return OK


def synthetic(workload: Workload, tokenizer: Tokenizer, *, seed: int) -> Iterator[Request]:
    """The requests of a synthetic workload; the same for the same seed."""
    dice = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(tokenizer.vocab_size) for _ in range(count)]

    shared = tokens(workload.shared_tokens)
    sampling = SamplingParams(temperature=0.0, max_tokens=workload.max_tokens, ignore_eos=True)
    for row in range(workload.rows):
        own = tokens(workload.prompt_tokens - workload.shared_tokens)
        yield Request(id=row, prompt_token_ids=[*shared, *own], sampling=sampling)


def measure(engine: Engine, requests: list[Request]) -> dict[str, Any]:
    """Answer ``requests`` and count. ``load_s`` is from process start to here; latencies are from here on, all rows at once.

    Raises:
        ValueError: a request cannot be served.
    """
    load_s = process_seconds()
    start = time.perf_counter()
    finished_s = []
    for completion in engine.generate(requests):
        if completion.finish_reason == "error":
            raise ValueError(f"row {completion.request_id}: {completion.error_message}")
        finished_s.append(time.perf_counter() - start)
    run_s = time.perf_counter() - start
    stats = engine.stats.snapshot()
    keys = ("prompt_tokens", "computed_prompt_tokens", "generated_tokens", "prefix_hit_rate", "preemptions", "batch_size_mean", "kv_bytes")
    counts: dict[str, Any] = {key: stats[key] for key in keys}
    return {
        "rows": len(requests),
        **counts,
        "load_s": load_s,
        "run_s": run_s,
        "generated_tokens_per_s": counts["generated_tokens"] / run_s,
        "total_tokens_per_s": (counts["prompt_tokens"] + counts["generated_tokens"]) / run_s,
        "first_row_s": finished_s[0],
        "median_row_s": statistics.median(finished_s),
        "peak_rss_bytes": peak_rss_bytes(),
        "time_split": stats["time_split"],
    }


def _from_file(config: BenchConfig, tokenizer: Tokenizer) -> Iterator[Request]:
    job = make_job(config.job.name, tokenizer, prompt=config.prompt, sampling=config.sampling)
    source = replace(config.input, path=absolute(config.input.path))
    reader = open_reader(source, prompt_columns=job.prompt_columns, limit=config.limit)
    job.check(reader.schema)
    for shard in reader.read(reader.shards):
        for record in shard.records:
            if record.error is not None:
                raise ValueError(f"{record.row_key}: {record.error.message}")
            yield job.request(record)


def _machine() -> dict[str, Any]:
    return {
        "version": version("pagemill"),
        "revision": _revision(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "torch": version("torch"),
    }


def _settings(config: BenchConfig) -> dict[str, Any]:
    workload = Path(config.input.path).name or "synthetic"
    return {"model": config.model.path, "dtype": dtype_name(config.model, config.engine), "workload": workload}


def _revision() -> str | None:
    """The commit of the checkout that runs, None for an installed wheel."""
    folder = Path(__file__).absolute().parents[1]
    if not (folder / ".git").exists():
        return None
    asked = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None

"""One measured run in a process of its own: words of a command line in, one JSON object on stdout out.

Knows one run; how often it is repeated, and what else is measured, is jobs.bench's business.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from engine import Engine, Request, Tokenizer, context_length, model_identity
from engine.cost import ModelCost
from jobs._app import compose, guarded, make_job
from jobs._bench import padded
from jobs._bench.answers import Answers
from jobs._bench.config import BenchConfig
from jobs._bench.machine import code_here, machine_here
from jobs._bench.steps import Phases, StepLog
from jobs._bench.workload import from_file, synthetic
from jobs._provenance import dtype_name
from pipeline.report import peak_rss_bytes, process_seconds

if TYPE_CHECKING:
    from engine.roof import Roof
    from engine.runner.runner import ModelRunner


def main(overrides: list[str]) -> int:
    """Measure one run and print it; a refusal is printed too, as ``{"error": ...}``, and the exit code is 2."""
    _live_no_longer_than_parent()
    return guarded(lambda: _print(overrides))


def _print(overrides: list[str]) -> int:
    try:
        print(json.dumps(measure(compose("bench", overrides, kind=BenchConfig))), flush=True)
    except (ValueError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    return 0


def measure(config: BenchConfig) -> dict[str, Any]:
    """Load, answer the workload once and count. Nothing is warmed up, as in a run.

    ``load_s`` is from the process's start until the model is ready, ``first_row_s`` and ``wall_s`` go on from there; the time in
    which the requests are made is in none of them, it is ``time_split.tokenise``.

    Raises:
        ValueError: a setting, or a row of the workload, cannot be served.
    """
    from engine.weights import read_spec

    tokenizer = Tokenizer.load(config.model)
    spec = read_spec(config.model)
    _check_lengths(config, max_model_len=context_length(config.model, config.engine))  # before prompts of any length are made
    start = time.perf_counter()
    requests = _requests(config, tokenizer, vocab_size=min(tokenizer.vocab_size, spec.vocab_size))
    tokenise_s = time.perf_counter() - start
    numbers = padded.measure(config, requests) if config.bench.answered_by == "transformers" else _run(config, tokenizer, requests)
    numbers |= {key: numbers[key] - tokenise_s for key in ("load_s", "first_row_s", "wall_s")}
    numbers["time_split"]["tokenise"] = tokenise_s
    return {
        **code_here(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_here(),
        "model": os.path.basename(config.model.path.rstrip("/")),
        "model_files": model_identity(config.model),
        "answered_by": config.bench.answered_by,
        "workload": os.path.basename(config.input.path) or str(config.bench),
        "rows": len(requests),
        **numbers,
    }


def _run(config: BenchConfig, tokenizer: Tokenizer, requests: list[Request]) -> dict[str, Any]:
    """The engine's figures. The machine's limits are measured last, when memory and time are noted."""
    engine = Engine.from_config(model=config.model, engine=config.engine, kv_cache=config.kv_cache, tokenizer=tokenizer)
    load_s = process_seconds()
    _check_lengths(config, max_model_len=engine.max_model_len)  # for which the pool counts too

    runner = cast("ModelRunner", engine.runner)
    log = StepLog(runner, cost=_cost(config, engine))
    engine.runner = log
    answers, run_s = _answer(engine, _batches(config, requests), log)
    numbers = _counts(engine, log, run_s=run_s)
    memory = {"peak_rss_bytes": peak_rss_bytes()}
    engine.close()  # which saves the blocks for kv_cache.persist, and that is no part of what was measured
    return {
        "settings": _settings(config, runner),
        **numbers,
        **answers.numbers(),
        "load_s": load_s,
        "first_row_s": load_s + answers.first_s,
        "wall_s": load_s + run_s,
        **memory,
        "time_split": dict(engine.stats.seconds),
        "roof": _held_against(_measure_roof(config, runner), log, run_s=run_s) if config.bench.roof else None,
    }


def _requests(config: BenchConfig, tokenizer: Tokenizer, *, vocab_size: int) -> list[Request]:
    if not config.input.path:
        return list(synthetic(config.bench, vocab_size=vocab_size, sampling=config.sampling, seed=config.seed))[: config.limit]
    job = make_job(config.job.name, tokenizer, prompt=config.prompt, sampling=config.sampling, model=config.model, engine=config.engine)
    requests = list(from_file(config.input, job=job, limit=config.limit))
    if not requests:
        raise ValueError(f"input.path: {config.input.path} has no rows")
    return requests


def _check_lengths(config: BenchConfig, *, max_model_len: int) -> None:
    prompt, answer = config.bench.prompt_lengths.high, config.bench.answer_lengths.high
    if not config.input.path and prompt + answer > max_model_len:
        key = "bench.max_tokens" if prompt < max_model_len else "bench.prompt_tokens"
        raise ValueError(
            f"{key}: prompts and answers of {prompt + answer} tokens do not fit into the {max_model_len} that one sequence "
            "may have here; ask for less, or raise engine.max_model_len or kv_cache.memory"
        )


def _batches(config: BenchConfig, requests: list[Request]) -> list[list[Request]]:
    """What is given to the engine in one go: all rows, or as many as run at once."""
    size = config.engine.max_num_seqs if config.bench.static_batches else len(requests)
    return [requests[first : first + size] for first in range(0, len(requests), size)]


def _answer(engine: Engine, batches: list[list[Request]], log: StepLog) -> tuple[Answers, float]:
    """The answers, and the seconds until the last one, without those of the log itself."""
    answers = Answers()
    start = time.perf_counter()
    log.start()
    for completion in itertools.chain.from_iterable(engine.generate(batch) for batch in batches):
        answers.add(completion, seconds=time.perf_counter() - start - log.own_s)
    return answers, time.perf_counter() - start - log.own_s


def _counts(engine: Engine, log: StepLog, *, run_s: float) -> dict[str, Any]:
    stats = engine.stats.snapshot()
    del stats["time_split"]
    phases = Phases.of(log.steps)
    num_prompt, num_generated = engine.stats.num_prompt_tokens, engine.stats.num_generated_tokens
    return {
        **stats,
        "batch_size_peak": log.most_seqs,
        "kv_bytes_peak": engine.stats.kv_bytes * engine.stats.num_blocks_peak / engine.stats.num_blocks,
        "generated_tokens_per_s": num_generated / run_s,
        "total_tokens_per_s": (num_prompt + num_generated) / run_s,
        **asdict(phases),
        "prefill_tokens_per_s": phases.prefill_tokens / phases.prefill_s if phases.prefill_tokens else None,
        "decode_tokens_per_s": phases.decode_tokens / phases.decode_s if phases.decode_tokens else None,
        "step_s_median": log.percentile(0.5),
        "step_s_p99": log.percentile(0.99),
        "model_flops_per_s": sum(step.flops for step in log.steps) / run_s,
        "model_read_bytes_per_s": sum(step.read_bytes for step in log.steps) / run_s,
    }


def _cost(config: BenchConfig, engine: Engine) -> ModelCost:
    """The decoder's matrices are counted, so that a family's own shapes are in it."""
    from engine.layers.decoder import Decoder
    from engine.weights import read_spec

    spec = read_spec(config.model)
    decoder = Decoder(spec)
    num_layer_weights = sum(weight.numel() for weight in decoder.layers.parameters() if weight.ndim == 2)
    last = decoder.layers[-1]
    num_last_weights = sum(weight.numel() for weight in last.parameters() if weight.ndim == 2) - last.self_attn.qkv_proj.weight.numel()
    return ModelCost(
        num_token_weights=num_layer_weights - num_last_weights,
        num_row_weights=num_last_weights + decoder.lm_head.weight.numel(),
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        bytes_per_weight=1 if config.model.weights == "int8" else _itemsize(config),
        kv_bytes_per_token=engine.stats.kv_bytes / engine.stats.num_blocks / config.kv_cache.block_size,
        block_size=config.kv_cache.block_size,
    )


def _itemsize(config: BenchConfig) -> int:
    import torch

    return int(getattr(torch, dtype_name(config.model, config.engine)).itemsize)


def _settings(config: BenchConfig, runner: ModelRunner) -> dict[str, Any]:
    """Every key of the engine and the cache, and what auto came to."""
    from engine.device import Device
    from engine.kv.format import format_name

    dtype = dtype_name(config.model, config.engine)
    return {
        "model.dtype": dtype,
        "model.weights": config.model.weights,
        **{f"engine.{key}": value for key, value in asdict(config.engine).items()},
        "engine.device": runner.device.type,
        "engine.attention": _backend_name(runner),
        "engine.threads": Device.find(config.engine.device, threads=config.engine.threads).num_threads,
        **{f"kv_cache.{key}": value for key, value in asdict(config.kv_cache).items()},
        "kv_cache.format": format_name(config.kv_cache.format, model_dtype=dtype),
        "sampling.temperature": config.sampling.temperature,
        "seed": config.seed,
    }


def _backend_name(runner: ModelRunner) -> str:
    return type(cast(Any, runner.forward).backend).__module__.rpartition(".")[2]


def _measure_roof(config: BenchConfig, runner: ModelRunner) -> Roof:
    import torch

    from engine.device import Device
    from engine.roof import measure_roof

    device = Device.find(config.engine.device, threads=config.engine.threads)
    roof: Roof = measure_roof(
        dtype=getattr(torch, dtype_name(config.model, config.engine)),
        device=runner.device,
        num_threads=device.num_threads,
        free_bytes=device.free_bytes(),
        kernels=cast(Any, runner.forward).backend.library if _backend_name(runner) == "cpu" else None,
        int8=config.model.weights == "int8",
    )
    return roof


def _held_against(roof: Roof, log: StepLog, *, run_s: float) -> dict[str, Any]:
    """The limits and the run's shares of them. ``share`` is the least time in which the steps could have run, each at the limit
    that binds it, over the time that they took; weights that stay in a cache can take a share of reading over 1."""
    least_s = sum(roof.seconds(flops=step.flops, read_bytes=step.read_bytes) for step in log.steps)
    return {
        **asdict(roof),
        "flops_share": sum(step.flops for step in log.steps) / run_s / roof.flops_per_s,
        "read_share": sum(step.read_bytes for step in log.steps) / run_s / roof.read_bytes_per_s,
        "share": least_s / run_s,
    }


def _live_no_longer_than_parent() -> None:
    """Whoever started this process holds its stdin open; a Ctrl-C is for them to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock the interpreter wants when it ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`pagemill plan`: what a run with the same overrides would come to; no weights are loaded and nothing is written.

Composes the run's own configuration and shows what pipeline.plan finds: a table, or one JSON object. Without an input, or of a
model that is no more than a config.json, it shows what the KV pool holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine import Capacity, Forecast, Tokenizer, TokenizerMissing
from jobs._app import OK, compose, guarded, make_job, read_run
from jobs._schema import RunConfig, as_yaml
from jobs._terminal import tell
from pipeline.plan import Plan, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How the plan is shown: as a table, or as one ``json`` object."""

    json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The keys of ``conf/plan.yaml``; all others are the run's."""

    plan: PlanOptions


def main(overrides: list[str], *, show: bool) -> int:
    """Plan and print; with ``show`` print the run's configuration instead."""
    return guarded(lambda: _plan(overrides, show=show))


def _plan(overrides: list[str], *, show: bool) -> int:
    own = [word for word in overrides if word.lstrip("+~").startswith("plan.")]
    options = compose("plan", own, kind=PlanConfig).plan
    words = [word for word in overrides if word not in own]
    has_rows = any(word.lstrip("+").startswith(("input.path=", "preset=")) for word in words)
    config = read_run(words if has_rows or show else [*words, "input.path=none"])
    if show:
        tell(as_yaml(config))
        return OK
    if not has_rows:
        return _sizes_only(config, options, reason="input.path names no input")
    try:
        found, capacity = plan_run(config)
    except TokenizerMissing as missing:
        return _sizes_only(config, options, reason=str(missing))
    numbers = {**capacity.numbers(), **found.numbers()}
    tell(json.dumps(numbers, ensure_ascii=False) if options.json else "\n".join(_table(found, capacity)))
    return OK


def plan_run(config: RunConfig) -> tuple[Plan, Capacity]:
    """The plan of one run, and what its KV pool holds.

    Raises:
        ValueError: the run would be refused; the message names the key.
    """
    tokenizer = Tokenizer.load(config.model)
    job = make_job(config.job.name, tokenizer, prompt=config.prompt, sampling=config.sampling, model=config.model, engine=config.engine)
    forecast = Forecast.from_config(model=config.model, engine=config.engine, kv_cache=config.kv_cache, tokenizer=tokenizer)
    found = plan(job, input=config.input, output=config.output, forecast=forecast, limit=config.limit, progress=config.progress)
    capacity = _capacity(config, num_bytes=forecast.pool.num_bytes)
    return found, replace(capacity, num_blocks=forecast.pool.num_blocks)  # a GPU's pool has a block more, which is nobody's


def _sizes_only(config: RunConfig, options: PlanOptions, *, reason: str) -> int:
    """What can be told of a model's config.json alone."""
    capacity = _capacity(config, num_bytes=None)
    left_out = f"rows, prompts, columns and what is amiss are left out: {reason}"
    if options.json:
        tell(json.dumps(capacity.numbers() | {"left_out": left_out}, ensure_ascii=False))
    else:
        tell("\n".join([*_sizes(capacity), _line("look at", left_out)]))
    return OK


def _capacity(config: RunConfig, *, num_bytes: int | None) -> Capacity:
    return Forecast.capacity(model=config.model, engine=config.engine, kv_cache=config.kv_cache, num_bytes=num_bytes)


def _sizes(capacity: Capacity) -> Iterator[str]:
    """The formula with its numbers, and how many sequences fit, by format."""
    own = capacity.format
    yield _line("KV cache", f"{own}: {capacity.formula}, {_size(capacity.block_bytes[own])} a block of {capacity.shape.block_size}")
    yield _line("  pool", f"{_size(capacity.num_bytes)}, {capacity.num_blocks:,} blocks")
    heads = [f"{length:,}" for length in capacity.lengths]
    yield _line(
        "  sequences that",
        f"format      a token  contiguous, {capacity.max_model_len:,} each   paged, of " + " ".join(f"{h:>9}" for h in heads),
    )
    width = len(f"contiguous, {capacity.max_model_len:,} each")
    for index, name in enumerate(sorted(capacity.block_bytes, key=lambda name: -capacity.block_bytes[name])):
        fits = " ".join(f"{capacity.paged(name, num_tokens=length):>9,}" for length in capacity.lengths)
        size = _size(capacity.token_bytes(name))
        label = "  fit the pool" if index == 0 else ""
        yield _line(label, f"{name + (' *' if name == own else ''):<7}{size:>12}  {capacity.contiguous(name):>{width},}             {fits}")


def _table(found: Plan, capacity: Capacity) -> Iterator[str]:
    outlook, pool = found.outlook, found.pool
    share = outlook.num_shared_tokens / max(outlook.num_prompt_tokens, 1)
    yield _line("rows", f"{found.num_rows:,}, of them {found.num_failed:,} would be error rows")
    for code, failures in found.failures.items():
        more = ", ..." if failures.num_rows > len(failures.first) else ""
        yield _line(f"  {code}", f"{failures.num_rows:,}: {', '.join(failures.first)}{more}")
    yield _line(
        "prompt tokens",
        f"{outlook.num_prompt_tokens:,}; {found.shortest_prompt:,} to {found.longest_prompt:,} a row, {found.mean_prompt:,.1f} on average",
    )
    yield _line(
        "  from the cache", f"{outlook.num_shared_tokens:,} ({share:.0%}) in whole blocks, where the pool keeps all shared prefixes"
    )
    yield _line("  to compute", f"{found.computed_tokens:,} at most")
    yield _line("context", f"{found.context_needed:,} tokens for the longest prompt and its max_tokens; the limit is {pool.max_len:,}")
    yield from _sizes(capacity)
    yield _line("  needed", f"{_size(outlook.num_needed_bytes)} for the {pool.max_num_seqs} largest rows at once (engine.max_num_seqs)")
    yield _line("  all prompts", f"{_size(outlook.num_prompt_bytes)}, equal prefixes once")
    yield _line(
        "  sequences",
        f"{found.num_fitting(found.mean_sequence):,} of average length fit at once, "
        f"{found.num_fitting(outlook.longest_sequence):,} of the longest",
    )
    for index, column in enumerate(found.columns):
        yield _line("columns" if index == 0 else "", f"{column.name}: {column.type}")
    for sentence in found.lint:
        yield _line("look at", sentence)


def _line(name: str, text: str) -> str:
    return f"{name:<18}{text}"


def _size(num_bytes: float) -> str:
    """``num_bytes`` as text in the units that kv_cache.memory takes."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"

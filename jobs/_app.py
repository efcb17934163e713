"""`pagemill run`: the one place where configuration, pipeline and engine meet.

Decides what a run is made of, what the user is told, and the exit code; it computes nothing itself.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import TypeVar, cast

from engine import Engine, EngineConfig, ModelConfig, SamplingParams, Tokenizer, WorkerLost, context_length, plugins
from jobs._compose import read_config
from jobs._provenance import provenance
from jobs._schema import RunConfig, absolute, as_yaml, schema_of, typed
from jobs._signals import INTERRUPTED, Stop, leave_at_once
from jobs._terminal import say, tell
from pipeline import Job, Limits, PrometheusFile, PromptOptions, RunError, Summary, run
from pipeline.ledger import Resume

T = TypeVar("T")
OK, FAULT, REFUSED, ROWS_FAILED, TOO_MANY_FAILED = 0, 1, 2, 3, 4


def main(overrides: list[str], *, show: bool) -> int:
    """Run one job and return its exit code; with ``show`` print its configuration instead."""
    return guarded(lambda: _show(overrides) if show else run_once(read_run(overrides)))


def guarded(command: Callable[[], int]) -> int:
    """Call ``command`` with log lines that read plainly.

    A ValueError or OSError that gets here is a refusal: one line and exit code 2. Anything else is a fault of ours.
    """
    logging.basicConfig(format="pagemill: %(message)s", level=logging.WARNING)
    try:
        return command()
    except (ValueError, OSError) as error:
        say(str(error))
        return REFUSED
    except WorkerLost as error:
        say(f"{error}; finished parts stay, and the same command goes on from there")
        return FAULT
    except Exception:
        traceback.print_exc()
        say("this is a fault of Pagemill; finished parts stay, and the same command goes on from there")
        return FAULT


def compose(name: str, overrides: list[str], *, kind: type[T]) -> T:
    """``conf/<name>.yaml`` with ``overrides``, as a ``kind``.

    Raises:
        ValueError: it is refused; the message names the key.
    """
    if any(word.startswith("model.path=") for word in overrides):  # the option's hash and fallback are another model's
        overrides = ["model.sha256=null", "model.fallback=null", *overrides]
    return typed(kind, read_config(name, overrides, schema=schema_of(kind)))


def read_run(overrides: list[str]) -> RunConfig:
    """The configuration of one run, with absolute paths; refused as ``compose`` does.

    Log probabilities that the sampling asks for get their columns without ``output.logprobs``.
    """
    config = compose("config", overrides, kind=RunConfig)
    if not config.input.path:
        raise ValueError("input.path: is empty; name a file, a folder or a glob")
    if config.output.path.startswith("memory://"):
        raise ValueError(
            f"output.path: {config.output.path} would be gone with this process; name a folder, or a store such as s3://BUCKET/FOLDER"
        )
    asked = config.sampling.logprobs, config.sampling.prompt_logprobs, config.sampling.logprob_token_ids or None
    logprobs = config.output.logprobs or any(value is not None for value in asked)
    prompt = replace(
        config.prompt,
        system_file=_placed(config.prompt.system_file),
        template_file=_placed(config.prompt.template_file),
        response_format_file=_placed(config.prompt.response_format_file),
    )
    return replace(
        config,
        input=replace(config.input, path=absolute(config.input.path)),
        prompt=prompt,
        output=replace(config.output, path=absolute(config.output.path), logprobs=logprobs),
        kv_cache=replace(config.kv_cache, persist=_placed(config.kv_cache.persist)),
        metrics=replace(config.metrics, prometheus=_placed(config.metrics.prometheus)),
    )


def _placed(path: str | None) -> str | None:
    return path and absolute(path)


def make_job(
    name: str, tokenizer: Tokenizer, *, prompt: PromptOptions, sampling: SamplingParams, model: ModelConfig, engine: EngineConfig
) -> Job:
    """The job that ``jobs/<name>.py`` makes; ``model`` and ``engine`` are those that its prompts are for.

    Raises:
        ValueError: there is no such job, or it refuses the settings.
    """
    module = plugins.load("jobs", name, key="job.name")
    if not hasattr(module, "make"):
        raise ValueError(f"job.name: {name!r} is a command and no job; start it as: pagemill {name}")
    context = None if prompt.on_overflow == "error" else context_length(model, engine)
    return cast(Job, module.make(tokenizer, prompt=prompt, sampling=sampling, max_model_len=context))


def prometheus_file(config: RunConfig) -> PrometheusFile | None:
    """The file that ``metrics.prometheus`` names; None where it names none.

    Raises:
        ValueError: its folder is not there.
    """
    if config.metrics.prometheus is None:
        return None
    info = {"task": config.job.name, "model": config.model.path, "kv_format": config.kv_cache.format, "version": version("pagemill")}
    return PrometheusFile(config.metrics.prometheus, run=config.name, info=info)


def run_once(config: RunConfig) -> int:
    """One run and what is told of it; returns the exit code.

    Raises:
        ValueError: it is refused; the message names the key.
    """
    leave_at_once()
    prometheus = prometheus_file(config)
    tokenizer = Tokenizer.load(config.model)
    job = make_job(config.job.name, tokenizer, prompt=config.prompt, sampling=config.sampling, model=config.model, engine=config.engine)
    stop = Stop()
    try:
        summary = run(
            job,
            input=config.input,
            output=config.output,
            provenance=provenance(config, tokenizer),
            load_engine=lambda: load_engine(config, tokenizer, saying=f"{config.name}: {job.announcement}", stop=stop),
            limit=config.limit,
            limits=config.limits,
            resume=cast(Resume, config.resume),
            progress=config.progress,
            prometheus=prometheus,
            stop=stop,
        )
    except RunError as error:
        say(f"{error}; finished parts stay, and the same command goes on from there")
        return FAULT
    tell(_told(summary))
    if summary.stopped == "max_error_rate":
        say(f"{too_many_failed(summary, limits=config.limits)}; what is finished stays")
        return TOO_MANY_FAILED
    if summary.stopped == "max_tokens_total" and not summary.metrics.get("prompt_tokens"):
        say(
            f"max_tokens_total: {config.limits.max_tokens_total} is less than the next row may need; raise it, or lower sampling.max_tokens"
        )
        return REFUSED
    if summary.stopped is not None:
        again = "the same command with resume=auto" if config.resume == "force" else "the same command again"
        say(f"stopped early ({summary.stopped}); {going_on(summary, limits=config.limits, again=again)}")
        return INTERRUPTED
    return ROWS_FAILED if summary.num_errors else OK


def load_engine(config: RunConfig, tokenizer: Tokenizer, *, saying: str, stop: Stop) -> Engine:
    """The engine of a run, announced by ``saying``; once it is loaded signals end the run in good order."""
    say(saying)
    engine = Engine.from_config(model=config.model, engine=config.engine, kv_cache=config.kv_cache, tokenizer=tokenizer)
    collect_seldom()
    stop.listen()
    return engine


def going_on(summary: Summary, *, limits: Limits, again: str = "the same command again") -> str:
    """What to do after a run that stopped early. One that did no row by its deadline would not by the next such deadline either."""
    load_s, wall_s = summary.metrics["load_s"], summary.metrics["wall_s"]
    if summary.stopped == "deadline" and summary.num_done == 0:
        return (
            f"loading took {load_s:.1f} s and the {wall_s - load_s:.1f} s that were left were not enough for one row, "
            "so the same command may never get further: run it with a later deadline"
        )
    later = " and a later deadline" if summary.stopped == "deadline" and limits.is_dated else ""
    return f"run {again}{later} to go on"


def too_many_failed(summary: Summary, *, limits: Limits) -> str:
    """Why a run stopped with ``TOO_MANY_FAILED``; where no part is finished yet, nothing else says what went wrong."""
    num_failed = sum(failures.num_rows for failures in summary.failures.values())
    code, commonest = next(iter(summary.failures.items()))
    return (
        f"stopped: more than max_error_rate={limits.max_error_rate:g} of the rows failed, {num_failed:,} of {summary.num_taken:,} so far; "
        f"{commonest.num_rows:,} of them with {code}, the first is {commonest.first[0]}"
    )


def collect_seldom() -> None:
    """Let the garbage collector pass over what is loaded by now, which stays, and look seldom at the rest: rows make no cycles.

    By default it looks at every row in flight again and again, which takes a tenth of the pipeline's time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _told(summary: Summary) -> str:
    """What came out and where it is."""
    numbers = summary.metrics
    cut = f", {summary.num_cut:,} cut at their length limit" if summary.num_cut else ""
    before = f" ({summary.num_resumed:,} of them from an earlier run)" if summary.num_resumed else ""
    rows = "1 row" if summary.num_asked == 1 else f"{summary.num_asked:,} rows"
    answers = f", {summary.num_rows:,} answers" if summary.num_rows != summary.num_asked else ""
    came_out = f"{answers}: {summary.num_ok:,} ok, {summary.num_errors:,} with an error{cut}"
    if summary.num_waiting:
        answered = summary.num_asked + summary.num_waiting
        lines = [
            f"{rows}{came_out}",
            f"{summary.num_waiting:,} more are answered and wait for the rest of their part, so {answered:,} are done{before}",
        ]
    else:
        lines = [f"{rows}{before}{came_out}"]
    if numbers.get("prompt_tokens"):
        lines.append(
            f"{numbers['prompt_tokens']:,} prompt tokens ({numbers['prefix_hit_rate']:.0%} of them from the prefix cache), "
            f"{numbers['generated_tokens']:,} generated in {numbers['wall_s'] - numbers['load_s']:.1f} s "
            f"after {numbers['load_s']:.1f} s of loading"
        )
    if numbers["prompts_truncated"]:
        lines.append(f"{numbers['prompts_truncated']:,} prompts were too long and cut to fit (prompt.on_overflow)")
    if summary.num_errors:
        lines.append(f"errors:  {summary.output_path}/errors.jsonl")
    return "\n".join([*lines, f"answers: {summary.parts}"])


def _show(overrides: list[str]) -> int:
    tell(as_yaml(read_run(overrides)))
    return OK

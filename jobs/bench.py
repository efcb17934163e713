"""`pagemill bench`: how fast this machine answers a workload, for every combination of the settings that commas part.

Starts a fresh process for each run, so that load time, memory and caches are that run's own; what a run measures is
jobs._bench.point's. A JSON line for each point goes to stdout and the table to stderr; with ``bench.output`` the lines are
appended to that file, and the table goes to stdout. With ``table=kv`` the points are those of a page of tables, which is written
at the end.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from jobs._app import FAULT, OK, REFUSED, ROWS_FAILED, compose, guarded
from jobs._bench.config import BenchConfig
from jobs._bench.page import Page
from jobs._bench.table import table
from jobs._bench.workload import Workload
from jobs._compose import points
from jobs._schema import absolute, as_yaml
from jobs._signals import INTERRUPTED, Stop
from jobs._terminal import say, tell

_OF_ALL_POINTS = ("bench.repeat", "bench.output", "bench.roof")
_OF_THE_SHAPE = tuple(f"bench.{key}" for key in Workload.__dataclass_fields__)


class Crash(Exception):
    """A run ended without figures, and without saying what it refuses."""


@dataclass(slots=True, kw_only=True)
class Point:
    """One combination of settings: the words of a command line, those among them that are its own, and what its runs gave."""

    words: list[str]
    own: dict[str, str]
    config: BenchConfig
    runs: list[dict[str, Any]] = field(default_factory=list)
    failure: ValueError | Crash | None = None

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.own.items())

    @property
    def line(self) -> dict[str, Any]:
        """The JSON object: all figures of the median run, of an even number the faster of the two in the middle, so that they fit
        each other, its own measure of the machine's limits included; beside them every run's rate."""
        if self.failure is not None:
            return {"point": self.own, "error": str(self.failure)}
        by_rate = sorted(self.runs, key=_seconds)
        rates = [run["generated_tokens_per_s"] for run in self.runs]
        return {
            "point": self.own,
            "repeat": len(self.runs),
            **by_rate[(len(by_rate) - 1) // 2],
            "generated_tokens_per_s_best": max(rates),
            "generated_tokens_per_s_runs": rates,
            "load_s_median": statistics.median(run["load_s"] for run in self.runs),
        }


def main(overrides: list[str], *, show: bool) -> int:
    """Measure and print; with ``show`` print the configurations instead.

    Returns 0; 3 where one of several points could not be measured, whose line has an ``error``; 75 where a signal ended it.
    """
    return guarded(lambda: _show(overrides) if show else _measure(overrides))


def _show(overrides: list[str]) -> int:
    tell("---\n".join(as_yaml(point.config) for point in _points(overrides)))
    return OK


def _measure(overrides: list[str]) -> int:
    found = _points(overrides)
    if not found[0].config.table.tables:
        return _bench(found)
    if found[0].own:
        raise ValueError(f"{next(iter(found[0].own))}: a page of tables has points of its own and takes one value; start it once for each")
    with TemporaryDirectory(prefix="pagemill-bench-") as folder:
        page = Page(found[0].config.table, words=overrides, folder=Path(folder))
        own = (
            Point(words=words, own={"table": name, "point": point}, config=compose("bench", words, kind=BenchConfig))
            for (name, point), words in page.points.items()
        )
        return _bench(list(own), page)


def _points(overrides: list[str]) -> list[Point]:
    """The points with their configurations, checked before the first one runs.

    Raises:
        ValueError: one is refused, or a key that is the whole benchmark's is swept over; the message names the key.
    """
    found = []
    for shared, own in points(overrides):
        words = [*shared, *own]
        keys = [word.lstrip("+").partition("=")[0] for word in words]
        config = compose("bench", words, kind=BenchConfig)
        if config.input.path and (useless := next((key for key in keys if key in _OF_THE_SHAPE), None)):
            raise ValueError(f"{useless}: shapes the synthetic workload, and input.path names a file; leave one of them out")
        if not config.table.tables and (useless := next((key for key in keys if key.startswith("table.")), None)):
            raise ValueError(f"{useless}: says how a page of tables is made, and none is asked for; choose one, as with table=kv")
        values = dict(word.lstrip("+").split("=", 1) for word in own)
        if swept := next((key for key in _OF_ALL_POINTS if key in values), None):
            raise ValueError(f"{swept}: is one for the whole benchmark and is not swept over")
        found.append(Point(words=words, own=values, config=config))
    return found


def _bench(found: list[Point], page: Page | None = None) -> int:
    """Run the points and print what comes of them: a table, or the ``page``, which a signal leaves as it was."""
    options = found[0].config.bench
    stop = Stop()
    stop.listen()
    lines: list[dict[str, Any]] = []
    with _destination(options.output) as write:
        if page is not None:
            page.make_folder()
        for point in _take_turns(found, repeat=options.repeat, stop=stop):
            if point.failure is not None and len(found) == 1:
                say(str(point.failure))
                return REFUSED if isinstance(point.failure, ValueError) else FAULT
            lines.append(point.line)
            write(lines[-1])
    if lines:
        told = table(lines) if page is None or stop() else f"page: {page.write(lines)}"
        if options.output is not None:
            tell(told)
        else:
            print(told, file=sys.stderr)
    if stop():
        return INTERRUPTED
    return ROWS_FAILED if any("error" in line for line in lines) else OK


def _take_turns(found: list[Point], *, repeat: int, stop: Stop) -> Iterator[Point]:
    """Run each point ``repeat`` times, one after the other round by round, so that whatever else the machine does meets all of them
    alike. A point comes out when its last run is over: the last of all, one that failed, or one before a signal."""
    for turn in range(1, repeat + 1):
        for number, point in enumerate(found, start=1):
            if stop() or point.failure is not None:
                continue
            if len(found) * repeat > 1:
                say(f"point {number} of {len(found)}, run {turn} of {repeat}: {point}".rstrip(": "))
            try:
                point.runs.append(run_apart(point.words))
            except (ValueError, Crash) as failure:
                point.failure = failure
                yield point
                continue
            if turn == repeat:
                yield point
    if stop():
        yield from (point for point in found if point.failure is None and 0 < len(point.runs) < repeat)


@contextmanager
def _destination(path: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Where a line goes: stdout, or the end of a file, which is opened before minutes of work and not after them."""
    if path is None:
        yield lambda line: tell(json.dumps(line))
        return
    try:
        stream = open(absolute(path), "a", encoding="utf-8", buffering=1)  # noqa: SIM115  closed below
    except OSError as error:
        raise ValueError(f"bench.output: {path} cannot be written ({error.strerror})") from error
    with stream:
        yield lambda line: print(json.dumps(line), file=stream)


def run_apart(words: list[str]) -> dict[str, Any]:
    """What ``jobs._bench.point`` measures for these words in a fresh interpreter.

    ``-P`` keeps a ``jobs`` folder that lies where the command was started from being taken for ours. The process ends when its
    stdin does, so it lives no longer than this one.

    Raises:
        ValueError: a setting or a row was refused.
        Crash: the process ended otherwise.
    """
    command = [sys.executable, "-P", "-m", "jobs._bench.point", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        code = process.wait()
    if code == OK:
        return cast(dict[str, Any], json.loads(printed))
    if code == REFUSED and printed:
        raise ValueError(json.loads(printed)["error"])
    if code < 0:
        hint = ", which Linux sends where memory runs out" if -code == signal.SIGKILL else ""
        raise Crash(f"the run was ended by {signal.Signals(-code).name}{hint}")
    raise Crash(f"the run ended with exit code {code}; what went wrong stands above")


def _seconds(run: dict[str, Any]) -> float:
    return float(run["wall_s"] - run["load_s"])

"""A run's metrics as a text file that node_exporter's textfile collector picks up.

Knows the metrics' public names, their help texts and the file; it counts nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from pipeline.lock import locked_file
from pipeline.report import Metrics

REFRESH_SECONDS = 5.0
_ENDING = ".prom"
_LOG = logging.getLogger(__name__)

# Name in the file (less pagemill_, and _total for counters) -> key of metrics.json, and what it says there.
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens, cached ones included; a prompt counts once, when it is admitted."),
    "cached_prompt_tokens": ("cached_prompt_tokens", "Prompt tokens that came from the prefix cache."),
    "generated_tokens": ("generated_tokens", "Tokens of answers."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens computed once more after a preemption."),
    "preemptions": ("preemptions", "Sequences that gave their blocks back before they were finished."),
    "steps": ("steps", "Steps of the engine."),
}
_GAUGES = {
    "resumed_rows": ("rows_resumed", "Input rows that an earlier run answered."),
    "prefix_hit_ratio": ("prefix_hit_rate", "Cached prompt tokens over all prompt tokens."),
    "kv_pool_bytes": ("kv_bytes", "Size of the KV pool."),
    "kv_blocks_peak": ("kv_blocks_peak", "Most blocks that live sequences held at once."),
    "kv_utilisation_ratio": ("kv_utilisation", "Stored tokens over slots in the blocks that live sequences held in the last step."),
    "kv_fragmentation_ratio": ("kv_fragmentation", "1 less the utilisation: the share of held slots that was empty in the last step."),
    "batch_size_mean": ("batch_size_mean", "Sequences in a step, averaged over steps."),
    "load_seconds": ("load_s", "From the start of the process until the engine was ready."),
    "run_seconds": ("wall_s", "Since the start of the process."),
    "peak_resident_memory_bytes": ("peak_rss_bytes", "Most memory that the process held at once."),
    "peak_device_memory_bytes": ("peak_device_bytes", "Most memory that tensors held on the GPU at once; not there without one."),
}
# Name -> label, its values and their keys, what it says.
_LABELLED_GAUGES = {
    "kv_blocks": (
        "state",
        {"used": "kv_blocks_used", "cached": "kv_blocks_cached", "free": "kv_blocks_free"},
        "Blocks of the pool in the last step: held by live sequences, kept for later prompts, free.",
    ),
    "sequences": (
        "state",
        {"running": "sequences_running", "waiting": "sequences_waiting"},
        "Sequences that the last step computed, and those that were queued behind it.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """Where metrics go beside ``metrics.json``: ``prometheus`` is a .prom file, rewritten while the run goes on."""

    prometheus: str | None = None

    def __post_init__(self) -> None:
        path = self.prometheus
        if path is not None and ("://" in path or not Path(path).name.endswith(_ENDING) or Path(path).name == _ENDING):
            raise ValueError(f"metrics.prometheus: {path!r} is no file on this machine that ends in {_ENDING}; others are not picked up")


class PrometheusFile:
    """One run's file, and no other run's while this one goes on. It is replaced as a whole, so that no reader finds half of it.

    Every metric has the label ``run``: two files in one folder must not hold the same metric with equal labels.
    """

    def __init__(self, path: str, *, run: str, info: Mapping[str, str]) -> None:
        """``info``: labels of ``pagemill_run_info``.

        Raises:
            ValueError: the file's folder is not there.
        """
        if not Path(path).parent.is_dir():
            raise ValueError(f"metrics.prometheus: there is no folder {Path(path).parent}; make it first")
        self._path = path
        self._run = run
        self._info = dict(info)
        self._metrics: Metrics | None = None
        self._written_s = 0.0
        self._ended_at: float | None = None
        self._complete = False
        self._can_write = True
        self._registry = CollectorRegistry()
        self._registry.register(self)

    @contextmanager
    def following(self, metrics: Metrics) -> Iterator[None]:
        """Write the state of ``metrics`` when the block begins, by ``update`` while it runs, and when it ends.

        Raises:
            ValueError: another run writes the file, or it cannot be written, and the block has not begun.
        """
        with locked_file(Path(self._path), key="metrics.prometheus"):
            self._metrics = metrics
            try:
                self._write()
            except OSError as error:
                raise ValueError(f"metrics.prometheus: {self._path} cannot be written: {error}") from error
            try:
                yield
                self._complete = metrics.is_complete
            finally:
                self._ended_at = time.time()
                self._try_to_write()

    def update(self) -> None:
        """Write the state of now, if the last one is some seconds old."""
        if time.monotonic() - self._written_s >= REFRESH_SECONDS:
            self._try_to_write()

    def collect(self) -> Iterator[Metric]:
        """The metrics of now, as the registry asks for them."""
        if self._metrics is None:
            return
        metrics = self._metrics
        num_failed = metrics.failures.num_rows
        numbers = metrics.summary(rows_ok=metrics.rows_done - num_failed, rows_error=num_failed)
        yield from self._about_the_run(metrics)
        rows = {"ok": numbers["rows_ok"], "error": numbers["rows_error"]}
        yield self._counter("rows", "Input rows that this run answered.", rows, label="status")
        yield self._counter("stage_seconds", "Seconds of each kind of work.", numbers["time_split"], label="stage")
        for name, (key, text) in _COUNTERS.items():
            if key in numbers:
                yield self._counter(name, text, {"": numbers[key]})
        for name, (key, text) in _GAUGES.items():
            if numbers.get(key) is not None:
                yield self._gauge(name, text, {"": numbers[key]})
        for name, (label, keys, text) in _LABELLED_GAUGES.items():
            yield self._gauge(name, text, {value: numbers[key] for value, key in keys.items() if key in numbers}, label=label)
        if waits := numbers.get("time_to_first_token_s"):
            yield self._first_token(waits)

    def _about_the_run(self, metrics: Metrics) -> Iterator[Metric]:
        info = InfoMetricFamily("pagemill_run", "What runs.", labels=["run"])
        info.add_metric([self._run], self._info)
        yield info
        yield self._gauge("run_complete", "1 when every row of the input is answered, else 0.", {"": float(self._complete)})
        if self._ended_at is not None:
            yield self._gauge("run_end_timestamp_seconds", "When the run ended, complete or not, in Unix time.", {"": self._ended_at})
        yield self._gauge("input_rows", "Rows of the input.", {"": metrics.rows_total})

    def _counter(self, name: str, text: str, values: Mapping[str, float], *, label: str | None = None) -> Metric:
        return self._filled(CounterMetricFamily(f"pagemill_{name}", text, labels=["run", label] if label else ["run"]), values)

    def _gauge(self, name: str, text: str, values: Mapping[str, float], *, label: str | None = None) -> Metric:
        return self._filled(GaugeMetricFamily(f"pagemill_{name}", text, labels=["run", label] if label else ["run"]), values)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
        """A sample for each value of the label; a metric without one has a single value, under ""."""
        for value, number in values.items():
            family.add_metric([self._run, value] if value else [self._run], number)
        return family

    def _first_token(self, waits: Mapping[str, float]) -> Metric:
        """A summary; the library's own class for it has no quantiles."""
        name = "pagemill_time_to_first_token_seconds"
        summary = Metric(name, "From a request's coming to the engine until its first token is drawn.", "summary")
        if waits["count"]:
            summary.add_sample(name, {"run": self._run, "quantile": "0.5"}, waits["p50"])
            summary.add_sample(name, {"run": self._run, "quantile": "0.99"}, waits["p99"])
        summary.add_sample(f"{name}_count", {"run": self._run}, waits["count"])
        summary.add_sample(f"{name}_sum", {"run": self._run}, waits["count"] * (waits["mean"] or 0.0))
        return summary

    def _try_to_write(self) -> None:
        """A file that cannot be written any more is no reason to end a run: it warns once, and tries again."""
        try:
            self._write()
            self._can_write = True
        except OSError as error:
            if self._can_write:
                _LOG.warning("metrics.prometheus: %s cannot be written any more: %s; the run goes on", self._path, error)
            self._can_write = False

    def _write(self) -> None:
        self._written_s = time.monotonic()
        write_to_textfile(self._path, self._registry)

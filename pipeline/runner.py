"""Shards to requests to engine to parts: the pipeline's one entry, ``run``.

Holds at most a few shards in memory; it does not know how rows are read, asked, answered or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine import Completion, Request
from pipeline.job import Job
from pipeline.ledger import Provenance, Resume
from pipeline.reader import InputOptions
from pipeline.writer import OutputOptions


class Stats(Protocol):
    def snapshot(self) -> Mapping[str, Any]: ...


class Engine(Protocol):
    """What the runner needs of an engine: completions come back in any order, one a request."""

    @property
    def stats(self) -> Stats: ...

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """A None among the requests says: nothing more before something has finished."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did; ``num_resumed`` rows of ``num_rows`` were there from an earlier run, ``num_cut`` hit a length limit."""

    output_path: str
    num_rows: int
    num_ok: int
    num_errors: int
    num_resumed: int
    num_cut: int
    interrupted: bool
    metrics: Mapping[str, Any]


def run(
    job: Job,
    *,
    input: InputOptions,
    output: OutputOptions,
    provenance: Provenance,
    load_engine: Callable[[], Engine],
    limit: int | None = None,
    resume: Resume = "auto",
    progress: bool = True,
) -> Summary:
    """Read every row of ``input``, answer it, and write it to ``output``.

    Three phases: input and output are opened and checked; then ``load_engine`` is called, unless every part is there
    already; then the rows run. The engine is closed at the end. SIGINT (KeyboardInterrupt) during the last phase ends
    it early: finished parts stay and ``Summary.interrupted`` is true.

    Raises:
        ValueError: something is refused; before ``load_engine`` is called unless the engine itself refuses.
    """
    raise NotImplementedError

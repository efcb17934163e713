"""Rows to requests, many at once: what asking for a row is, and whose fault it is where it fails.

Knows jobs, readers and records; in which thread this happens and who answers the requests, it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import pyarrow as pa

from engine import Request
from pipeline.columns import row_label
from pipeline.job import Job
from pipeline.prompt import Prompt
from pipeline.reader import Reader
from pipeline.types import Part, Record, RowError, RunError, ShardRows

# Rows that are asked for together: at most enough for their texts to be encoded in one go, and at first, and where rows are long,
# so few that the next ones are there soon and that a run can stop.
_MOST_ROWS, _FIRST_ROWS, _BATCH_SECONDS = 64, 8, 0.1


class Question(NamedTuple):
    """A row as it goes to the engine: its place in its shard, its names, its request or what is wrong with it, and whether
    its prompt was cut to fit."""

    row: int
    row_id: str
    row_key: str
    asked: Request | RowError
    is_cut: bool


class Asked(NamedTuple):
    """What a record asks of the engine, or why it cannot be asked; ``is_cut`` where its prompt was cut to fit."""

    record: Record
    request: Request | RowError
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Some questions of one shard, in input order; ``table`` is the whole shard's."""

    part: Part
    table: pa.Table
    questions: Sequence[Question]


class Asking:
    """Reads shards and asks for their rows.

    Attributes:
        seconds: kind of work -> wall seconds so far.
    """

    def __init__(self, job: Job, reader: Reader, *, id_column: str | None) -> None:
        self.seconds = {"read": 0.0, "tokenise": 0.0}
        self._job = job
        self._reader = reader
        self._id_column = id_column

    def batches(self, parts: Sequence[Part]) -> Generator[Batch, None, None]:
        """The rows of ``parts``, in input order.

        Raises:
            RunError: a shard cannot be read any more.
        """
        shards = self._reader.read([part.shard for part in parts])
        for part in parts:
            start = time.perf_counter()
            read = _read(shards)
            self.seconds["read"] += time.perf_counter() - start
            asking = ask(self._job, read.records)
            while True:
                start = time.perf_counter()
                questions = [self._question(*asked) for asked in next(asking, ())]
                self.seconds["tokenise"] += time.perf_counter() - start
                if not questions:
                    break
                yield Batch(part, read.table, questions)

    def _question(self, record: Record, asked: Request | RowError, is_cut: bool) -> Question:
        row_id = record.row_key
        try:
            row_id = row_label(record.columns, id_column=self._id_column, row_key=record.row_key)
        except Exception as error:  # as in ``ask``
            asked = RowError.of(error)
        return Question(record.index, row_id, record.row_key, asked, is_cut)


def ask(job: Job, records: Iterable[Record]) -> Iterator[list[Asked]]:
    """What each of ``records`` asks of the engine, in their order and a few dozen at a time."""
    source = iter(records)
    num_rows = _FIRST_ROWS
    while batch := list(islice(source, num_rows)):
        start = time.perf_counter()
        sound = [record for record in batch if record.error is None]
        prompts = dict(zip((record.index for record in sound), job.prompts.build([record.columns for record in sound]), strict=True))
        asked = [_asked(job, record, prompts.get(record.index, record.error)) for record in batch]
        is_quick = time.perf_counter() - start < _BATCH_SECONDS
        num_rows = min(2 * num_rows, _MOST_ROWS) if is_quick else max(num_rows // 2, 1)
        yield asked


def _asked(job: Job, record: Record, prompt: Prompt | RowError | None) -> Asked:
    assert prompt is not None, "a record without an error has a prompt, or the reason why not"
    if isinstance(prompt, RowError):
        return Asked(record, prompt, is_cut=False)
    try:
        return Asked(record, job.request(record, prompt_token_ids=prompt.token_ids), prompt.is_cut)
    except Exception as error:  # whatever a row does to its own handling is that row's error
        return Asked(record, RowError.of(error), is_cut=False)


def _read(shards: Iterator[ShardRows]) -> ShardRows:
    try:
        return next(shards)
    except (ValueError, OSError) as error:  # it was looked through before, so it changed or went away
        raise RunError(str(error)) from error

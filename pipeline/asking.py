"""Rows to requests, many at once: the one place where it is decided what asking for a row is, and whose fault it is where it fails.

Knows jobs and records; who reads the rows and who answers the requests, it does not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from engine import Request
from pipeline.job import Job
from pipeline.types import Record, RowError

# Rows that are asked for together: enough for their texts to be encoded in one go, few enough for the first to be there soon.
_ROWS_A_BATCH = 64


def ask(job: Job, records: Iterable[Record]) -> Iterator[list[tuple[Record, Request | RowError]]]:
    """What each of ``records`` asks of the engine, or why it cannot be asked, in their order and a few dozen at a time."""
    source = iter(records)
    while batch := list(islice(source, _ROWS_A_BATCH)):
        sound = [record for record in batch if record.error is None]
        prompts = dict(zip((record.index for record in sound), job.prompts.token_ids([record.columns for record in sound]), strict=True))
        yield [(record, record.error or _request(job, record, prompts[record.index])) for record in batch]


def _request(job: Job, record: Record, prompt: list[int] | RowError) -> Request | RowError:
    if isinstance(prompt, RowError):
        return prompt
    try:
        return job.request(record, prompt_token_ids=prompt)
    except Exception as error:  # whatever a row does to its own handling is that row's error
        return RowError.of(error)

"""What a job is to the pipeline: a record becomes a request, a completion becomes columns.

It also holds the one job that most people run, text generation; chat and plain generation differ only in their prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from engine import Completion, Request
from pipeline.prompt import Prompts
from pipeline.types import Record


class Job(Protocol):
    """A new job is one file in ``jobs/`` with one of these.

    While rows run, ``prompts`` and ``request`` are used in one thread and ``answer`` in another.

    Attributes:
        prompts: what makes a row's prompt.
        fields: the columns that the job adds to those that every output has (see ``pipeline.columns``).
        prompt_columns: the input columns that a prompt can come from; each input file must have one of them.
        announcement: what the user should know before the first row runs, as one line.
    """

    @property
    def prompts(self) -> Prompts: ...

    @property
    def fields(self) -> Sequence[pa.Field]: ...

    @property
    def prompt_columns(self) -> Sequence[str]: ...

    @property
    def announcement(self) -> str: ...

    def check(self, schema: pa.Schema) -> None:
        """Look at the input's columns before any model is loaded.

        Raises:
            ValueError: no row could be served; the message names the setting or the column.
        """
        ...

    def request(self, record: Record, *, prompt_token_ids: Sequence[int]) -> Request:
        """The engine's request for ``record``, whose prompt is given, with ``id=record.row_key``.

        Raises:
            RowError: this row cannot be asked.
        """
        ...

    def answer(self, completion: Completion) -> Mapping[str, Any]:
        """``generation``, ``reasoning`` and the job's own ``fields`` for one completion without error; absent is null.

        A shared column that means another thing in this job may be given too.

        Raises:
            RowError: the answer is no good (``invalid_output``).
        """
        ...


class TextJob:
    """Prompts in, text out: serves ``job=chat`` and ``job=generate``, which differ in how ``prompts`` are built."""

    fields: Sequence[pa.Field] = ()

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts

    @property
    def prompt_columns(self) -> Sequence[str]:
        return self.prompts.columns

    @property
    def announcement(self) -> str:
        return f"an answer has at most {self.prompts.defaults.max_tokens} tokens (sampling.max_tokens)"

    def check(self, schema: pa.Schema) -> None:
        self.prompts.check(schema.names)

    def request(self, record: Record, *, prompt_token_ids: Sequence[int]) -> Request:
        return Request(
            id=record.row_key,
            prompt_token_ids=prompt_token_ids,
            sampling=self.prompts.sampling(record.columns),
            grammar=self.prompts.grammar(record.columns),
        )

    def answer(self, completion: Completion) -> Mapping[str, Any]:
        return {"generation": completion.text}

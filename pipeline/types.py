"""The pipeline's values: a row with its name, a shard of input, a part of output, and what went wrong with a row.

Knows no file format, no prompt and no engine; everything here is immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

ErrorCode = Literal[
    "too_long",
    "empty_prompt",
    "bad_row",
    "bad_params",
    "template_error",
    "grammar_error",
    "invalid_output",
    "numerical_error",
    "engine_error",
]


class RowError(Exception):
    """One row that cannot be answered; it becomes an error row and the job goes on.

    Attributes:
        code: one of the contract's error codes.
        message: what is wrong and what to do, for the row's author.
    """

    def __init__(self, code: str, message: str) -> None:
        # A template may quote a lone surrogate of the row, which no output file can hold.
        self.message = message.encode("utf-8", "replace").decode("utf-8")
        self.code = code
        super().__init__(self.message)

    @classmethod
    def of(cls, error: Exception) -> RowError:
        """What ``error``, met while a row was handled, makes of the row: whatever it does to its own handling is its own error."""
        return error if isinstance(error, cls) else cls("bad_row", f"the row cannot be handled: {type(error).__name__}: {error}")


class RunError(Exception):
    """A run that began and cannot go on: the disk is full, an input went away. What is finished stays; a later run goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One input row.

    ``row_key`` is "<input file, relative>:<row in file>", rows counted from 0. ``index`` counts inside the shard.
    ``columns`` has every column of the input's schema, None where the row lacks it; getting one may raise RowError. A row
    that could not be read has ``error``, and in ``columns`` what is left of it.
    """

    row_key: str
    index: int
    columns: Mapping[str, Any]
    error: RowError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A unit of input: ``num_rows`` rows of one file from ``first_row`` on.

    ``start`` and ``stop`` bound it in the reader's own units: bytes of the decompressed text, from the first row's first to
    the last row's last, or rows of a table. ``first_line`` is the line of ``start``, counted from 1 (0 where there are no
    lines). ``digest`` is a sha256 that changes when a value of the range does.
    """

    file: str
    first_row: int
    num_rows: int
    start: int
    stop: int
    first_line: int
    digest: str


@dataclass(frozen=True, slots=True)
class ShardRows:
    """A shard that has been read: ``table`` is carried to the output as it is, ``records`` are the same rows in order.

    Invariant: ``table.num_rows == shard.num_rows``, and row ``i`` of the table is the record with ``index == i``.
    """

    shard: Shard
    table: pa.Table
    records: Iterable[Record]


@dataclass(frozen=True, slots=True)
class Part:
    """A unit of output: the answers to one shard. Its file exists if and only if all its rows are in it."""

    index: int
    shard: Shard

    @property
    def stem(self) -> str:
        return f"part-{self.index:05d}"

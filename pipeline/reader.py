"""What a reader is: asked once for the columns and shards of an input, and then for rows, shard by shard.

Knows no file format: a format is one module in ``pipeline/readers``, found by its file name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import pyarrow as pa

from engine import plugins
from pipeline.input_files import InputFile, find_files
from pipeline.types import Shard, ShardRows

# A shard ends before it holds more than this many bytes of input, so that a few open shards always fit in memory.
SHARD_BYTES = 64 * 2**20
_ROWS_LOOKED_AT = 1000  # for the names of the columns that are there, where one that was asked for is not


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Where rows come from.

    ``format`` is a module of ``pipeline/readers``; ``path`` a file, a folder or a glob, here or behind a URL. ``columns``
    reads only those (default: all). ``id_column`` labels the rows (default: ``id``, else ``custom_id``, else the row key).
    """

    format: str
    path: str
    id_column: str | None = None
    columns: tuple[str, ...] | None = None
    rows_per_shard: int = 1024

    def __post_init__(self) -> None:
        if self.rows_per_shard < 1:
            raise ValueError(f"input.rows_per_shard: {self.rows_per_shard} must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a format is asked to look through.

    ``columns`` are kept and carried (None: all); ``prompt_columns`` are those that a prompt can come from; ``limit`` is
    the most rows. ``known`` are the shards of earlier runs: rows are cut there again, so that what was appended since
    begins a shard of its own. Whether a known shard's content is the same is told by its digest and is the ledger's to see.
    """

    path: str
    columns: Sequence[str] | None
    prompt_columns: Sequence[str]
    rows_per_shard: int
    limit: int | None
    known: Sequence[Shard] = ()
    output_path: str | None = None
    _known_rows: Mapping[tuple[str, int], int] = field(init=False)

    def __post_init__(self) -> None:
        known_rows = {(shard.file, shard.first_row): shard.num_rows for shard in self.known}
        object.__setattr__(self, "_known_rows", known_rows)

    def files(self, suffixes: Sequence[str]) -> list[InputFile]:
        """See ``find_files``."""
        return find_files(self.path, suffixes=suffixes, output_path=self.output_path)

    def known_rows(self, file: str, *, first_row: int) -> int | None:
        """How many rows the known shard of ``file`` that begins at ``first_row`` has; None where there is none."""
        return self._known_rows.get((file, first_row))


class Reader(Protocol):
    """An input that has been looked through once: its columns and its shards are known, its rows are not held.

    Attributes:
        schema: of every table that ``read`` gives; fixed before the first row is read.
        shards: in input order.
    """

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def shards(self) -> Sequence[Shard]: ...

    def read(self, shards: Iterable[Shard]) -> Iterator[ShardRows]:
        """The rows of ``shards``, which are some of ``self.shards`` in their order; one shard is read at a time.

        Raises:
            ValueError: a file cannot be read any more; the message names it.
        """
        ...


class Format(Protocol):
    """A module in ``pipeline/readers``."""

    def scan(self, asked: Scan) -> Reader:
        """Find the input and look through it for columns and shards.

        Raises:
            ValueError: a file is no such format, or has none of ``prompt_columns`` while others do; the message names it.
        """
        ...


def open_reader(
    options: InputOptions,
    *,
    prompt_columns: Sequence[str],
    limit: int | None,
    known: Sequence[Shard] = (),
    output_path: str | None = None,
) -> Reader:
    """Find the files and look through them; ``known`` and ``output_path`` are explained at ``Scan`` and ``find_files``.

    Raises:
        ValueError: nothing there, no rows, or files that cannot be read; the message names the key or the file.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: {limit} must be 1 or more")
    module = cast(Format, plugins.load("pipeline.readers", options.format, key="input"))
    asked = Scan(
        path=options.path,
        columns=options.columns,
        prompt_columns=prompt_columns,
        rows_per_shard=options.rows_per_shard,
        limit=limit,
        known=known,
        output_path=output_path,
    )
    reader = module.scan(asked)
    if not reader.shards:
        raise ValueError(f"input.path: {options.path!r} has no rows")
    for key, wanted in (("input.columns", options.columns or ()), ("input.id_column", filter(None, [options.id_column]))):
        missing = sorted(set(wanted) - set(reader.schema.names))
        if missing:
            there = module.scan(replace(asked, columns=None, limit=min(limit or _ROWS_LOOKED_AT, _ROWS_LOOKED_AT))).schema.names
            reason = "input.columns leaves out" if missing[0] in there else "the input has no column"
            raise ValueError(f"{key}: {reason} {missing[0]!r}; it has {', '.join(map(repr, there))}")
    return reader

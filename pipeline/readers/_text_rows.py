"""Text files as shards: rows that stand one after the other in a file's text, cut, counted and read again by byte.

Knows no syntax: a format hands in how the next rows are parsed. Column types are those of ``_json_types``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from pipeline.input_files import InputFile
from pipeline.reader import SHARD_BYTES, Scan
from pipeline.readers._json_types import JsonType
from pipeline.readers._lines import Lines, open_lines
from pipeline.types import Record, RowError, Shard, ShardRows


class TextRow(NamedTuple):
    """One row of a text: bytes ``start`` to ``stop`` without the line's end, beginning in line ``line``.

    ``text`` are those bytes. ``error`` says why the row cannot be served; ``values`` is then what is left of it.
    """

    start: int
    stop: int
    line: int
    text: bytes
    values: dict[str, Any]
    error: RowError | None


class RowParser(Protocol):
    """A format. A file is parsed from its beginning first; ``lines`` may begin at any row afterwards."""

    def __call__(self, lines: Lines, file: InputFile) -> Iterator[TextRow]:
        """Raises ValueError where the file as a whole is not of the format; the message names it."""
        ...


def scan(asked: Scan, *, files: Sequence[InputFile], parse: RowParser) -> TextReader:
    """Parse every row of ``files`` once, for shards and column types.

    A file without any of the prompt columns is not refused: its rows are error rows, like any row that lacks them.
    """
    types: dict[str, JsonType] = {}
    shards: list[Shard] = []
    remaining = asked.limit
    for file in files:
        if remaining == 0:
            break
        with open_lines(file) as lines:
            rows = _typed(itertools.islice(parse(lines, file), remaining), types=types, columns=asked.columns)
            found = list(_shards(rows, file=file, asked=asked))
        shards += found
        if remaining is not None:
            remaining -= sum(shard.num_rows for shard in found)
    return TextReader(files, parse=parse, types=types, shards=shards)


class TextReader:
    """See ``pipeline.reader.Reader``; columns come in the order of their first appearance."""

    def __init__(self, files: Sequence[InputFile], *, parse: RowParser, types: dict[str, JsonType], shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.schema = pa.schema([pa.field(name, kind.arrow()) for name, kind in types.items()])
        self._parse = parse
        self._files = {file.name: file for file in files}
        self._converters = {name: kind.converter() for name, kind in types.items()}

    def read(self, shards: Iterable[Shard]) -> Iterator[ShardRows]:
        for name, group in itertools.groupby(shards, key=lambda shard: shard.file):
            file = self._files[name]
            with open_lines(file) as lines:
                for shard in group:
                    lines.skip_to(shard.start, number=shard.first_line)
                    cut = _Cut(file, first_row=shard.first_row)
                    rows = [cut.add(row) for row in itertools.islice(self._parse(lines, file), shard.num_rows)]
                    if cut.shard() != shard:
                        raise ValueError(f"{file}: the file changed while it was read; run again")
                    table = pa.table([self._column(name, rows) for name in self.schema.names], schema=self.schema)
                    yield ShardRows(shard, table, self._records(shard, rows))

    def _records(self, shard: Shard, rows: Sequence[TextRow]) -> Iterator[Record]:
        for index, row in enumerate(rows):
            columns = {name: row.values.get(name) for name in self.schema.names}
            yield Record(row_key=f"{shard.file}:{shard.first_row + index}", index=index, columns=columns, error=row.error)

    def _column(self, name: str, rows: Sequence[TextRow]) -> pa.Array:
        convert = self._converters[name]
        values = [row.values.get(name) for row in rows]
        return pa.array(values if convert is None else [convert(value) for value in values], type=self.schema.field(name).type)


def _typed(rows: Iterable[TextRow], *, types: dict[str, JsonType], columns: Sequence[str] | None) -> Iterator[TextRow]:
    for row in rows:
        for name, value in row.values.items():
            if columns is None or name in columns:
                if (kind := types.get(name)) is None:
                    kind = types[name] = JsonType()
                kind.add(value)
        yield row


def _shards(rows: Iterable[TextRow], *, file: InputFile, asked: Scan) -> Iterator[Shard]:
    """Cuts after so many rows or bytes. Blank lines between rows belong to no shard, nor does the last row's line end."""
    cut = _Cut(file, first_row=0)
    full = asked.known_rows(file.name, first_row=0) or asked.rows_per_shard
    for row in rows:
        if cut.num_rows == full or (cut.num_rows and row.stop - cut.start > SHARD_BYTES):
            yield cut.shard()
            cut = _Cut(file, first_row=cut.first_row + cut.num_rows)
            full = asked.known_rows(file.name, first_row=cut.first_row) or asked.rows_per_shard
        cut.add(row)
    if cut.num_rows:
        yield cut.shard()


class _Cut:
    """A shard in the making: of its rows it keeps what the shard tells of them."""

    __slots__ = ("_digest", "_file", "_first_line", "_stop", "first_row", "num_rows", "start")

    def __init__(self, file: InputFile, *, first_row: int) -> None:
        self.first_row = first_row
        self.num_rows = 0
        self.start = 0
        self._stop = 0
        self._file = file
        self._first_line = 0
        self._digest = hashlib.sha256()  # of the rows' texts; line ends and blank lines do not count

    def add(self, row: TextRow) -> TextRow:
        if self.num_rows == 0:
            self.start, self._first_line = row.start, row.line
        self.num_rows += 1
        self._stop = row.stop
        self._digest.update(row.text + b"\n")
        return row

    def shard(self) -> Shard:
        return Shard(
            file=self._file.name,
            first_row=self.first_row,
            num_rows=self.num_rows,
            start=self.start,
            stop=self._stop,
            first_line=self._first_line,
            digest=self._digest.hexdigest(),
        )

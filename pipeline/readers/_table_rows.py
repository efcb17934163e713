"""Tables as shards: files of record batches, cut by rows, read again from any row, and fitted into one schema.

Knows no file format: a format hands in how a file is opened. A record batch is the least that is held in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from pipeline.reader import SHARD_BYTES, Scan
from pipeline.readers import _values
from pipeline.readers._key_folders import folder_columns
from pipeline.readers._table_schema import chosen, conformed, joined, refuse_without_prompt, unified
from pipeline.types import Record, RowError, Shard, ShardRows


class Source(Protocol):
    """A file, or what stands for one; ``name`` begins its row keys, and as text it is what messages call it."""

    @property
    def name(self) -> str: ...


class OpenTable(Protocol):
    """A source that is open."""

    @property
    def schema(self) -> pa.Schema: ...

    def batches(self, *, first_row: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Its rows from ``first_row`` on, with ``columns`` only, in their order in ``schema``."""
        ...


S = TypeVar("S", bound=Source)
Opener = Callable[[S], AbstractContextManager[OpenTable]]


def scan(asked: Scan, *, sources: Sequence[S], open_table: Opener[S]) -> TableReader[S]:
    """Read every row of ``sources`` once, for shards and their digests.

    ``open_table`` raises ValueError, also while the source is open, where it cannot be read; the message names it.
    """
    constants = folder_columns([source.name for source in sources])
    own: dict[str, pa.Schema] = {}
    whole: dict[str, pa.Schema] = {}
    shards: list[Shard] = []
    remaining = asked.limit
    for source in sources:
        if remaining == 0:
            break
        with open_table(source) as table:
            own[source.name] = schema = chosen(table.schema, file=str(source), columns=asked.columns)
            added = chosen(constants[source.name].schema, file=str(source), columns=asked.columns)
            whole[source.name] = pa.schema([*schema, *(field for field in added if field.name not in schema.names)])
            batches = _Batches(table.batches(first_row=0, columns=schema.names))
            found = list(_shards(batches, source=source, asked=asked, limit=remaining))
        shards += found
        if remaining is not None:
            remaining -= sum(shard.num_rows for shard in found)
    refuse_without_prompt(whole, asked.prompt_columns)
    return TableReader(sources, open_table=open_table, own=own, schema=unified(whole), constants=constants, shards=shards)


class TableReader(Generic[S]):
    """See ``pipeline.reader.Reader``."""

    def __init__(
        self,
        sources: Sequence[S],
        *,
        open_table: Opener[S],
        own: Mapping[str, pa.Schema],
        schema: pa.Schema,
        constants: Mapping[str, pa.Table],
        shards: Sequence[Shard],
    ) -> None:
        """``own`` are the chosen columns of each source, ``constants`` the further ones that are one value."""
        self.schema = schema
        self.shards = shards
        self._sources = {source.name: source for source in sources}
        self._open = open_table
        self._own = own
        self._constants = {name: table.to_pylist()[0] if table.num_rows else {} for name, table in constants.items()}

    def read(self, shards: Iterable[Shard]) -> Iterator[ShardRows]:
        for name, of_source in itertools.groupby(shards, key=lambda shard: shard.file):
            with self._open(self._sources[name]) as table:
                for run in _contiguous(of_source):
                    batches = _Batches(table.batches(first_row=run[0].start, columns=self._own[name].names))
                    for shard in run:
                        rows = list(batches.take(shard.num_rows))
                        if sum(batch.num_rows for batch in rows) != shard.num_rows or _values.digest(rows) != shard.digest:
                            raise ValueError(f"{self._sources[name]}: the file changed while it was read; run again")
                        yield self._fitted(shard, rows)

    def _fitted(self, shard: Shard, rows: Sequence[pa.RecordBatch]) -> ShardRows:
        fitting = [conformed(batch, self.schema, constants=self._constants[shard.file]) for batch in rows]
        table, bad_rows = _values.mended(joined(fitting, file=str(self._sources[shard.file])))
        return ShardRows(shard, table, _records(shard, table, bad_rows))


class _Batches:
    """An iterator of batches whose last one can be given back in part."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self._rest: pa.RecordBatch | None = None

    def take(self, num_rows: int, *, max_bytes: int | None = None) -> Iterator[pa.RecordBatch]:
        """The next ``num_rows`` rows; fewer at the end, or once there is a row and the next ones are over ``max_bytes``."""
        num_bytes = 0
        taken = False
        while num_rows > 0 and (batch := self._next()) is not None:
            fitting = num_rows
            if max_bytes is not None:
                fitting = min(num_rows, max(0 if taken else 1, (max_bytes - num_bytes) * batch.num_rows // max(batch.nbytes, 1)))
            if fitting < batch.num_rows:
                batch, self._rest = batch.slice(0, fitting), batch.slice(fitting)
                num_rows = fitting
            if batch.num_rows:
                yield batch
            taken = True
            num_rows -= batch.num_rows
            num_bytes += batch.nbytes

    def _next(self) -> pa.RecordBatch | None:
        batch, self._rest = self._rest, None
        return batch if batch is not None else next((each for each in self._batches if each.num_rows), None)


def _shards(batches: _Batches, *, source: Source, asked: Scan, limit: int | None) -> Iterator[Shard]:
    first = 0
    while limit is None or first < limit:
        known = asked.known_rows(source.name, first_row=first)
        wanted = known or asked.rows_per_shard
        if limit is not None:
            wanted = min(wanted, limit - first)
        rows = list(batches.take(wanted, max_bytes=None if known else SHARD_BYTES))
        if not rows:
            return
        num_rows = sum(batch.num_rows for batch in rows)
        digest = _values.digest(rows)
        joined(rows, file=str(source))  # or refuse it before anything is computed
        yield Shard(file=source.name, first_row=first, num_rows=num_rows, start=first, stop=first + num_rows, first_line=0, digest=digest)
        first += num_rows


class _ArrowRow(Mapping[str, Any]):
    """One row of a table as a mapping that turns a value into Python when it is asked for.

    Getting a value raises RowError ``bad_row`` where Python has no such value: a date past the year 9999.
    """

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: Mapping[str, pa.ChunkedArray], index: int) -> None:
        self._columns = columns
        self._index = index

    def __getitem__(self, name: str) -> Any:
        column = self._columns[name]
        try:
            return column[self._index].as_py()
        except (ValueError, ArithmeticError) as error:
            raise RowError("bad_row", f"{name}: the {column.type} cannot be read: {error}") from error

    def get(self, name: str, default: Any = None) -> Any:
        """As Mapping has it, without raising and catching: most rows are asked for more names than they have."""
        return self[name] if name in self._columns else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _records(shard: Shard, table: pa.Table, bad_rows: Mapping[int, str]) -> Iterator[Record]:
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for index in range(shard.num_rows):
        error = RowError("bad_row", f"{bad_rows[index]}: the text is no UTF-8") if index in bad_rows else None
        yield Record(row_key=f"{shard.file}:{shard.first_row + index}", index=index, columns=_ArrowRow(columns, index), error=error)


def _contiguous(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Runs of shards that follow each other without a gap."""
    run: list[Shard] = []
    for shard in shards:
        if run and run[-1].stop != shard.start:
            yield run
            run = []
        run.append(shard)
    if run:
        yield run

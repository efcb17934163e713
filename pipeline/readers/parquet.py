"""Parquet: row groups are streamed batch by batch, and files whose schemas differ become one table.

A column has one type in all files. Where they differ: numbers and times widen, text with large text is large text,
text with bytes is bytes (prompts are read from them as UTF-8), a dictionary beside its plain values is plain, structs
and lists are joined at every depth. A column that a file lacks is null in its rows.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.reader import SHARD_BYTES, InputFile
from pipeline.types import Record, Shard, ShardRows

SUFFIXES = (".parquet", ".pq")

_BATCH_ROWS = 256
_BUFFER_BYTES = 1 << 20


def scan(
    files: Sequence[InputFile],
    *,
    rows_per_shard: int,
    columns: Sequence[str] | None,
    prompt_columns: Sequence[str],
    limit: int | None,
) -> ParquetReader:
    """Read every file's footer; see ``pipeline.reader.Format``."""
    schemas: dict[str, pa.Schema] = {}
    shards: list[Shard] = []
    remaining = limit
    for file in files:
        if remaining == 0:
            break
        with _open(file.path) as parquet:
            schemas[file.name] = _chosen(parquet.schema_arrow.remove_metadata(), path=file.path, columns=columns)
            found = list(_shards(file, parquet.metadata, rows_per_shard=rows_per_shard, limit=remaining))
        shards += found
        if remaining is not None:
            remaining -= sum(shard.num_rows for shard in found)
    _refuse_without_prompt(schemas, prompt_columns)
    return ParquetReader(files, schema=_unified(schemas), shards=shards)


class ParquetReader:
    """See ``pipeline.reader.Reader``."""

    def __init__(self, files: Sequence[InputFile], *, schema: pa.Schema, shards: Sequence[Shard]) -> None:
        self.schema = schema
        self.shards = shards
        self._paths = {file.name: file.path for file in files}

    def read(self, shards: Iterable[Shard]) -> Iterator[ShardRows]:
        for name, of_file in itertools.groupby(shards, key=lambda shard: shard.file):
            with _open(self._paths[name]) as parquet:
                for run in _contiguous(of_file):
                    if parquet.metadata.num_rows < run[-1].stop:
                        raise ValueError(f"{self._paths[name]}: the file changed while it was read: it has fewer rows than before")
                    batches = self._batches(parquet, row=run[0].start)
                    for shard in run:
                        table = pa.Table.from_batches(_take(batches, shard.num_rows), schema=self.schema).unify_dictionaries()
                        yield ShardRows(shard, table, _records(shard, table))

    def _batches(self, parquet: pq.ParquetFile, *, row: int) -> _Batches:
        """Batches in the reader's schema from ``row`` on, decoding from the row group that holds it."""
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        group = next(index for index, end in enumerate(ends) if row < end)
        wanted = [name for name in parquet.schema_arrow.names if name in self.schema.names]
        stream = parquet.iter_batches(batch_size=_BATCH_ROWS, row_groups=range(group, len(sizes)), columns=wanted)
        batches = _Batches(_conformed(batch, self.schema) for batch in stream)
        for _ in _take(batches, row - (ends[group] - sizes[group])):
            pass
        return batches


class _Batches:
    """An iterator of batches whose last one can be given back in part."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = iter(batches)
        self._rest: pa.RecordBatch | None = None

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        batch = self._rest if self._rest is not None else next(self._batches, None)
        self._rest = None
        if batch is not None and batch.num_rows > max_rows:
            batch, self._rest = batch.slice(0, max_rows), batch.slice(max_rows)
        return batch


def _take(batches: _Batches, num_rows: int) -> Iterator[pa.RecordBatch]:
    """The next ``num_rows`` rows, fewer at the end."""
    while num_rows > 0 and (batch := batches.next(num_rows)) is not None:
        num_rows -= batch.num_rows
        yield batch


class _ArrowRow(Mapping[str, Any]):
    """One row of a table as a mapping that turns a value into Python when it is asked for."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: Mapping[str, pa.ChunkedArray], index: int) -> None:
        self._columns = columns
        self._index = index

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._index].as_py()

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _records(shard: Shard, table: pa.Table) -> Iterator[Record]:
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for index in range(shard.num_rows):
        yield Record(row_key=f"{shard.file}:{shard.first_row + index}", index=index, columns=_ArrowRow(columns, index))


@contextmanager
def _open(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet:
            yield parquet
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}") from error


def _shards(file: InputFile, metadata: pq.FileMetaData, *, rows_per_shard: int, limit: int | None) -> Iterator[Shard]:
    total = metadata.num_rows if limit is None else min(limit, metadata.num_rows)
    num_bytes = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    size = max(1, min(rows_per_shard, SHARD_BYTES * metadata.num_rows // max(num_bytes, 1)))
    footer = _footer_digest(file.path, num_bytes=metadata.serialized_size)
    for first in range(0, total, size):
        stop = min(first + size, total)
        digest = hashlib.sha256(f"{footer}:{first}:{stop}".encode()).hexdigest()
        yield Shard(file=file.name, first_row=first, num_rows=stop - first, start=first, stop=stop, first_line=0, digest=digest)


def _footer_digest(path: Path, *, num_bytes: int) -> str:
    """A sha256 of the file's size and footer, which holds the place, size and statistics of every column chunk."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - num_bytes - 8))
        return hashlib.sha256(str(size).encode() + stream.read()).hexdigest()


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


def _chosen(schema: pa.Schema, *, path: Path, columns: Sequence[str] | None) -> pa.Schema:
    names = schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: the column {twice[0]!r} is there twice; give every column a name of its own")
    return schema if columns is None else pa.schema([field for field in schema if field.name in columns])


def _refuse_without_prompt(schemas: Mapping[str, pa.Schema], prompt_columns: Sequence[str]) -> None:
    without = [name for name, schema in schemas.items() if not set(prompt_columns) & set(schema.names)]
    if without and len(without) < len(schemas):
        raise ValueError(
            f"input.path: {without[0]} has none of the columns {', '.join(prompt_columns)}, which other files have; "
            f"its columns are {', '.join(schemas[without[0]].names)}"
        )


def _unified(schemas: Mapping[str, pa.Schema]) -> pa.Schema:
    """One schema for all files: columns in the order of their first appearance, types by the module's rule."""
    kinds: dict[str, list[tuple[str, pa.DataType]]] = {}
    for file, schema in schemas.items():
        for field in schema:
            kinds.setdefault(field.name, []).append((file, field.type))
    return pa.schema([pa.field(name, _joined(name, seen)) for name, seen in kinds.items()])


def _joined(name: str, seen: Sequence[tuple[str, pa.DataType]]) -> pa.DataType:
    joined = seen[0][1]
    for file, kind in seen[1:]:
        if kind == joined:
            continue
        try:
            both = [pa.schema([pa.field(name, _plain(one))]) for one in (joined, kind)]
            joined = pa.unify_schemas(both, promote_options="permissive").field(name).type
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise ValueError(
                f"input.path: the column {name!r} is {joined} in {seen[0][0]} and {kind} in {file}, which no type holds; "
                "cast one of them, or leave the column out with input.columns"
            ) from error
    return joined


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary or view encoding, so that it can be joined with a plain one."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if kind == pa.string_view():
        return pa.large_string()
    return pa.large_binary() if kind == pa.binary_view() else kind


def _conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """``batch`` in ``schema``: columns by name, absent ones null, others cast without loss of values."""
    arrays = []
    for field in schema:
        index = batch.schema.get_field_index(field.name)
        array = pa.nulls(batch.num_rows, field.type) if index < 0 else batch.column(index)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.record_batch(arrays, schema=schema)

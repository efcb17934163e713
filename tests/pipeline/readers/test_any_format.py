"""What every format keeps: values and types come out as they went in, whatever the shards and the cuts of earlier runs."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from pipeline.reader import InputOptions, Reader, open_reader
from pipeline.types import Shard

SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "prompt": pa.string(),
        "score": pa.float64(),
        "tags": pa.list_(pa.string()),
        "messages": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    }
)
FIRST = {"id": 0, "prompt": "p", "score": 0.5, "tags": ["t"], "messages": [{"role": "user", "content": "c"}]}
TEXTS = st.text(max_size=6)
TABLES = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.none() | st.integers(-(2**63), 2**63 - 1),
            "prompt": st.none() | TEXTS,
            "score": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "tags": st.none() | st.lists(st.none() | TEXTS, max_size=3),
            "messages": st.none() | st.lists(st.fixed_dictionaries({"role": TEXTS, "content": st.none() | TEXTS}), max_size=2),
        }
    ),
    max_size=30,
).map(lambda rows: pa.Table.from_pylist([FIRST, *rows], schema=SCHEMA))  # one row that fills all: a JSON null has no type


def jsonl(table: pa.Table, _: int) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()


def table_csv(table: pa.Table, _: int) -> bytes:
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(table.column_names)
    rows.writerows(row.values() for row in table.to_pylist())
    return text.getvalue().encode()


def parquet(table: pa.Table, batch: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=batch)
    return sink.getvalue().to_pybytes()


def arrow(table: pa.Table, batch: int, *, new: Callable[..., Any], compression: str | None) -> bytes:
    sink = pa.BufferOutputStream()
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=batch)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, tuple[str, Callable[[pa.Table, int], bytes]]] = {
    "jsonl": ("jsonl", jsonl),
    "jsonl.gz": ("jsonl", lambda table, batch: gzip.compress(jsonl(table, batch))),
    "csv": ("csv", table_csv),
    "csv.bz2": ("csv", lambda table, batch: bz2.compress(table_csv(table, batch))),
    "parquet": ("parquet", parquet),
    "arrow": ("arrow", lambda table, batch: arrow(table, batch, new=pa.ipc.new_file, compression=None)),
    "arrow.lz4": ("arrow", lambda table, batch: arrow(table, batch, new=pa.ipc.new_file, compression="lz4")),
    "arrows": ("arrow", lambda table, batch: arrow(table, batch, new=pa.ipc.new_stream, compression="zstd")),
}


def opened(path: str | Path, *, format: str, known: Sequence[Shard] = (), **options: Any) -> Reader:
    return open_reader(InputOptions(format=format, path=str(path), **options), prompt_columns=["prompt"], limit=None, known=known)


def expected(table: pa.Table, format: str) -> pa.Table:
    """CSV has no types: a field is its text, and an empty one is null."""
    if format != "csv":
        return table
    rows = [{name: None if value is None else str(value) or None for name, value in row.items()} for row in table.to_pylist()]
    return pa.Table.from_pylist(rows, schema=pa.schema([(name, pa.string()) for name in table.column_names]))


def check(reader: Reader, wanted: pa.Table) -> None:
    seen = list(reader.read(reader.shards))
    assert reader.schema == wanted.schema
    assert pa.concat_tables(rows.table for rows in seen).equals(wanted)
    records = [record for rows in seen for record in rows.records]
    assert [record.row_key.rsplit(":", 1)[1] for record in records] == [str(i) for i in range(wanted.num_rows)]
    assert [dict(record.columns) for record in records] == wanted.to_pylist()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None)
@given(table=TABLES, batch=st.integers(1, 12), size=st.integers(1, 12), early=st.integers(1, 31), late_size=st.integers(1, 12))
def test_what_goes_in_comes_out_and_known_cuts_stay(
    tmp_path_factory: pytest.TempPathFactory, name: str, table: pa.Table, batch: int, size: int, early: int, late_size: int
) -> None:
    format, write = FORMATS[name]
    path = tmp_path_factory.mktemp("any") / f"in.{name}"
    before = table.slice(0, early)
    path.write_bytes(write(before, batch))
    first = opened(path, format=format, rows_per_shard=size)
    check(first, expected(before, format))

    path.write_bytes(write(table, late_size))  # the file has grown, and its batches have other borders
    second = opened(path, format=format, rows_per_shard=late_size, known=first.shards)
    check(second, expected(table, format))
    assert list(second.shards[: len(first.shards)]) == list(first.shards)
    assert all(shard.num_rows <= late_size for shard in second.shards[len(first.shards) :])


@pytest.mark.parametrize("name", FORMATS)
def test_a_place_behind_a_url_reads_as_a_local_file(tmp_path: Path, name: str) -> None:
    format, write = FORMATS[name]
    table = pa.Table.from_pylist([FIRST | {"id": i} for i in range(20)], schema=SCHEMA)
    (tmp_path / f"in.{name}").write_bytes(write(table, 6))
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe(f"/formats/in.{name}", write(table, 6))
    near = opened(tmp_path / f"in.{name}", format=format, rows_per_shard=7)
    far = opened(f"memory://formats/in.{name}", format=format, rows_per_shard=7)
    assert near.shards == far.shards
    check(far, expected(table, format))
    middle = list(far.read(far.shards[1:2]))
    assert middle[0].table.equals(expected(table, format).slice(7, 7))


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"jsonl", "csv"}))  # there a cut line is an error row
def test_a_cut_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    format, write = FORMATS[name]
    table = pa.Table.from_pylist([FIRST | {"id": i} for i in range(200)], schema=SCHEMA)
    data = write(table, 20)
    path = tmp_path / f"in.{name}"
    path.write_bytes(data)
    reader = opened(path, format=format, rows_per_shard=10)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=rf"in\.{name}: "):
        opened(path, format=format)
    with pytest.raises(ValueError, match=rf"in\.{name}: "):
        list(reader.read(reader.shards))
    path.unlink()
    with pytest.raises(ValueError, match=rf"in\.{name}: "):
        list(reader.read(reader.shards))

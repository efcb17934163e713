"""Parquet parts: row groups bounded by bytes, statistics to skip them by, and no type that would come back as another."""

from __future__ import annotations

import itertools
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.writer import OutputOptions, PartWriter


def write(folder: Path, table: pa.Table, **options) -> Path:
    PartWriter(OutputOptions(path=str(folder), format="parquet", **options), schema=table.schema).write(
        folder / "part-00000.parquet", table
    )
    return folder / "part-00000.parquet"


@pytest.mark.parametrize(
    ("compression", "codec"), [("auto", "ZSTD"), ("zstd", "ZSTD"), ("lz4", "LZ4"), ("gzip", "GZIP"), ("none", "UNCOMPRESSED")]
)
def test_what_is_written_is_read(tmp_path: Path, compression: str, codec: str) -> None:
    table = pa.table({"n": range(1000), "text": [f"text {i}" for i in range(1000)]})
    file = pq.ParquetFile(write(tmp_path, table, compression=compression, batch_bytes=5000))
    assert file.read().equals(table)
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    assert {group.column(0).compression for group in groups} == {codec}
    ends = [(group.column(0).statistics.min, group.column(0).statistics.max) for group in groups]
    assert ends[0][0] == 0 and ends[-1][1] == 999 and all(one[1] + 1 == two[0] for one, two in itertools.pairwise(ends))
    assert all(group.column(0).has_column_index and group.column(0).has_offset_index for group in groups)


def test_a_row_group_holds_no_more_bytes_than_it_may(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * (i % 300) for i in range(500)] + ["y" * 5000]})
    file = pq.ParquetFile(write(tmp_path, table, batch_bytes=4000))
    groups = [file.read_row_group(index) for index in range(file.num_row_groups)]
    assert len(groups) > 10
    assert all(group.nbytes <= 4000 or group.num_rows == 1 for group in groups)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (pa.month_day_nano_interval(), "cannot hold month_day_nano_interval"),
        (pa.struct([]), "cannot hold struct<>"),
        (pa.run_end_encoded(pa.int32(), pa.string()), "cannot hold run_end_encoded"),
        (pa.dense_union([pa.field("a", pa.int8())]), "cannot hold dense_union"),
        (pa.binary(0), r"cannot hold fixed_size_binary\[0\]"),
        (pa.decimal128(9, -2), r"cannot hold decimal128\(9, -2\)"),
        (pa.list_(pa.struct({"a": pa.string_view()})), "cannot hold list<item: struct<a: string_view>>"),
        (pa.timestamp("s"), r"gives timestamp\[ms\] back for timestamp\[s\]"),
        (pa.list_(pa.time32("s")), r"gives list<element: time32\[ms\]> back"),
        (pa.dictionary(pa.int32(), pa.int64()), "gives int64 back for dictionary"),
    ],
)
def test_a_type_that_would_not_come_back_is_refused_with_its_column(tmp_path: Path, kind: pa.DataType, words: str) -> None:
    schema = pa.schema({"fine": pa.int64(), "odd one": kind})
    with pytest.raises(ValueError, match=rf"^output\.format: Parquet {words}.*'odd one'.*input\.columns"):
        PartWriter(OutputOptions(path=str(tmp_path), format="parquet"), schema=schema)
    PartWriter(OutputOptions(path=str(tmp_path), format="arrow"), schema=schema)


def test_datasets_reads_the_parts_in_order(run_job, write_jsonl, tmp_path: Path) -> None:
    run_job(write_jsonl([{"prompt": f"row {i}"} for i in range(20)]), output={"format": "parquet"})
    loaded = datasets.load_dataset("parquet", data_files=f"{tmp_path}/out/part-*.parquet", split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["generation"][:] == [f"{i} row" for i in range(20)]

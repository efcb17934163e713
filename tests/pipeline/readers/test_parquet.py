"""Parquet: rows come in file order whatever the row groups, and files of differing schemas are one table."""

from __future__ import annotations

import datetime
import itertools
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from pipeline.reader import InputOptions, Reader, open_reader
from pipeline.types import RowError


def opened(path: Path, *, limit: int | None = None, **options: Any) -> Reader:
    return open_reader(InputOptions(format="parquet", path=str(path), **options), prompt_columns=["prompt", "messages"], limit=limit)


def read(reader: Reader) -> pa.Table:
    return pa.concat_tables(rows.table for rows in reader.read(reader.shards))


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 2000),
    group=st.integers(1, 700),
    size=st.integers(1, 600),
    keep=st.lists(st.booleans(), min_size=40, max_size=40),
    limit=st.none() | st.integers(1, 2500),
)
def test_shards_are_slices_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, group: int, size: int, keep: list[bool], limit: int | None
) -> None:
    path = tmp_path_factory.mktemp("parquet") / "in.parquet"
    table = pa.table({"id": range(num_rows), "prompt": [f"row {i}" for i in range(num_rows)]})
    pq.write_table(table, path, row_group_size=group)
    reader = opened(path, rows_per_shard=size, limit=limit)
    assert sum(shard.num_rows for shard in reader.shards) == min(num_rows, limit or num_rows)
    wanted = [shard for index, shard in enumerate(reader.shards) if keep[index % len(keep)]]
    seen = list(reader.read(wanted))
    assert [rows.shard for rows in seen] == wanted
    for rows in seen:
        shard = rows.shard
        assert rows.table.equals(table.slice(shard.first_row, shard.num_rows))
        first = next(iter(rows.records))
        assert (first.row_key, first.index) == (f"in.parquet:{shard.first_row}", 0)
        assert dict(first.columns) == {"id": shard.first_row, "prompt": f"row {shard.first_row}"}


def test_empty_row_groups_are_nothing(tmp_path: Path) -> None:
    schema = pa.schema({"prompt": pa.string()})
    with pq.ParquetWriter(tmp_path / "in.parquet", schema) as writer:
        for texts in ([], ["a"], [], ["b", "c"], []):
            writer.write_table(pa.table({"prompt": texts}, schema=schema))
    assert read(opened(tmp_path / "in.parquet"))["prompt"].to_pylist() == ["a", "b", "c"]


def test_carried_types_are_kept_exactly(tmp_path: Path) -> None:
    columns = {
        "prompt": pa.array(["a", "b"]),
        "whole": pa.array([2**53 + 1, None], pa.int64()),
        "small": pa.array([1, 2], pa.uint8()),
        "price": pa.array([Decimal("1.10"), None], pa.decimal128(12, 2)),
        "at": pa.array([1, None], pa.timestamp("us", tz="UTC")),
        "day": pa.array([datetime.date(2024, 1, 2), None]),
        "blob": pa.array([b"\xff\x00", None], pa.binary()),
        "large": pa.array(["x", None], pa.large_string()),
        "tags": pa.array([["x", None], None], pa.list_(pa.string())),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        "fixed": pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
        "kind": pa.array(["u", None]).dictionary_encode(),
        "deep": pa.array([{"a": [{"b": 1}]}, None]),
        "nothing": pa.nulls(2),
    }
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    table = read(opened(tmp_path / "in.parquet"))
    assert table.schema.types == pa.table(columns).schema.types
    assert table.to_pylist() == pa.table(columns).to_pylist()


def test_files_of_differing_types_are_one_table(tmp_path: Path) -> None:
    files = {
        "a": pa.table({"id": pa.array([1], pa.int64()), "prompt": ["hello"]}),
        "b": pa.table({"prompt": pa.array(["hello"], pa.large_string()), "id": pa.array([2], pa.int32())}),
        "c": pa.table({"id": [3], "prompt": pa.array(["hello"]).dictionary_encode()}),
        "e": pa.table({"id": [4], "prompt": ["hello"], "extra": [Decimal("1.10")]}),
        "f": pa.table({"id": [5], "prompt": ["hello"], "extra": pa.nulls(1)}),
    }
    for name, table in files.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
    reader = opened(tmp_path)
    assert reader.schema == pa.schema({"id": pa.int64(), "prompt": pa.large_string(), "extra": pa.decimal128(3, 2)})
    table = read(reader)
    assert table["id"].to_pylist() == [1, 2, 3, 4, 5]
    assert table["prompt"].to_pylist() == ["hello"] * 5
    assert table["extra"].to_pylist() == [None, None, None, Decimal("1.10"), None]


@pytest.mark.parametrize("nested", [pa.list_, pa.large_list])
def test_nested_columns_are_joined_at_every_depth(tmp_path: Path, nested: Any) -> None:
    plain = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    wider = nested(pa.struct({"content": pa.large_string(), "role": pa.string(), "name": pa.string()}))
    pq.write_table(pa.table({"messages": pa.array([[{"role": "user", "content": "a"}]], plain)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"messages": pa.array([[{"role": "user", "content": "b", "name": "n"}]], wider)}), tmp_path / "b.parquet")
    rows = read(opened(tmp_path))["messages"].to_pylist()
    assert rows == [[{"role": "user", "content": "a", "name": None}], [{"role": "user", "content": "b", "name": "n"}]]


def test_a_file_without_any_prompt_column_is_refused_by_name(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "g.parquet")
    with pytest.raises(ValueError, match=r"g\.parquet has none of the columns prompt, messages"):
        opened(tmp_path)


def test_types_that_nothing_holds_are_refused_with_both_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "tag": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "tag": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"'tag' is int64 in a\.parquet and string in b\.parquet"):
        opened(tmp_path)
    assert read(opened(tmp_path, columns=("prompt",)))["prompt"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize("data", [b"", b"PAR1 and no more", b'{"prompt": "a"}\n'])
def test_a_file_that_is_no_parquet_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in.parquet").write_bytes(data)
    with pytest.raises(ValueError, match=r"in\.parquet: cannot be read as Parquet"):
        opened(tmp_path / "in.parquet")


def damaged_texts(*texts: bytes) -> pa.Array:
    """A string array that no writer should have made."""
    offsets = pa.array([0, *itertools.accumulate(map(len, texts))], pa.int32())
    return pa.Array.from_buffers(pa.string(), len(texts), [None, offsets.buffers()[1], pa.py_buffer(b"".join(texts))])


@pytest.mark.parametrize("wrapped", ["plain", "messages"])
def test_text_that_is_no_utf8_makes_one_error_row(tmp_path: Path, wrapped: str) -> None:
    column: pa.Array = damaged_texts(b"ok", b"\xff!", "ä".encode())
    if wrapped == "messages":
        column = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), pa.StructArray.from_arrays([column], ["content"]))
    pq.write_table(pa.table({"id": [1, 2, 3], "messages": column}), tmp_path / "in.parquet")
    (rows,) = opened(tmp_path / "in.parquet").read(opened(tmp_path / "in.parquet").shards)
    errors = [record.error for record in rows.records]
    assert [error.code if error else None for error in errors] == [None, "bad_row", None]
    assert "messages" in errors[1].message
    rows.table.validate(full=True)
    texts = [value[0]["content"] if wrapped == "messages" else value for value in rows.table["messages"].to_pylist()]
    assert texts == ["ok", "\ufffd!", "ä"]


@pytest.mark.parametrize("kind", [pa.timestamp("ms"), pa.timestamp("us", tz="UTC"), pa.date32(), pa.timestamp("us", tz="No/Where")])
def test_a_time_that_python_has_not_is_carried_and_a_row_error_when_it_is_asked_for(tmp_path: Path, kind: pa.DataType) -> None:
    late = pa.array([2**31 - 1], pa.int32()) if kind == pa.date32() else pa.array([2**60])
    pq.write_table(pa.table({"id": late.view(kind), "prompt": ["a"]}), tmp_path / "in.parquet")
    (rows,) = opened(tmp_path / "in.parquet").read(opened(tmp_path / "in.parquet").shards)
    (record,) = rows.records
    with pytest.raises(RowError, match=r"id: the (timestamp|date32)") as caught:
        record.columns.get("id")
    assert caught.value.code == "bad_row"
    assert record.columns["prompt"] == "a"
    assert rows.table["id"].equals(pq.read_table(tmp_path / "in.parquet")["id"])


def test_a_rewritten_file_of_equal_footer_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    footers = []
    shards = []
    for middle in ("b", "c"):
        pq.write_table(pa.table({"prompt": ["a", middle, "b", "z"]}), path, compression="none", use_dictionary=False)
        data = path.read_bytes()
        footers.append((len(data), data[-8 - int.from_bytes(data[-8:-4], "little") :]))
        shards.append(opened(path).shards[0])
    assert footers[0] == footers[1], "size and statistics tell nothing here"
    assert shards[0] != shards[1]


@settings(max_examples=25, deadline=None)
@given(
    group=st.integers(1, 60), compression=st.sampled_from(["none", "snappy", "zstd"]), dictionary=st.booleans(), page=st.integers(100, 300)
)
def test_the_digest_does_not_depend_on_how_the_file_is_laid_out(
    tmp_path_factory: pytest.TempPathFactory, group: int, compression: str, dictionary: bool, page: int
) -> None:
    folder = tmp_path_factory.mktemp("layout")
    table = pa.table(
        {
            "prompt": [None if i % 7 == 0 else f"row {i % 11}" for i in range(50)],
            "messages": [None if i % 5 == 0 else [{"role": "user", "content": None if i % 3 else "x"}] * (i % 4) for i in range(50)],
            "flag": [None if i % 2 else i % 3 == 0 for i in range(50)],
            "map": pa.array([None if i % 6 == 0 else [(f"k{i}", i)] * (i % 3) for i in range(50)], pa.map_(pa.string(), pa.int32())),
            "fixed": pa.array([None if i % 4 == 0 else [1.0, i] for i in range(50)], pa.list_(pa.float32(), 2)),
        }
    )
    pq.write_table(table, folder / "in.parquet")
    before = opened(folder / "in.parquet", rows_per_shard=9).shards
    pq.write_table(
        table, folder / "in.parquet", row_group_size=group, compression=compression, use_dictionary=dictionary, data_page_size=page
    )
    assert opened(folder / "in.parquet", rows_per_shard=9).shards == before


def test_folders_of_key_and_value_are_columns(tmp_path: Path) -> None:
    for folder, text in (("lang=en/year=2024", "a"), ("lang=de%20AT/year=7", "b"), ("lang=__HIVE_DEFAULT_PARTITION__/year=8", "c")):
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(pa.table({"prompt": [text, text]}), tmp_path / folder / "x.parquet")
    reader = opened(tmp_path)
    assert reader.schema == pa.schema({"prompt": pa.string(), "lang": pa.string(), "year": pa.int64()})
    found = {row["prompt"]: (row["lang"], row["year"]) for row in read(reader).to_pylist()}
    assert found == {"a": ("en", 2024), "b": ("de AT", 7), "c": (None, 8)}
    assert opened(tmp_path, columns=("prompt", "year")).schema.names == ["prompt", "year"]
    pq.write_table(pa.table({"prompt": ["d"], "year": ["in the file"]}), tmp_path / "lang=en" / "year=2024" / "x.parquet")
    only = opened(tmp_path / "lang=en")
    assert read(only)["year"].to_pylist() == ["in the file"], "a file's own column goes before the folder's"


def test_a_folder_value_with_leading_zeros_is_text(tmp_path: Path) -> None:
    for folder in ("batch=007", "batch=8"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / folder / "x.parquet")
    assert read(opened(tmp_path))["batch"].to_pylist() == ["007", "8"]


def test_wide_rows_make_smaller_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.readers._table_rows.SHARD_BYTES", 10_000)
    texts = [str(i) * 1000 for i in range(100)]
    pq.write_table(pa.table({"prompt": texts}), tmp_path / "in.parquet", use_dictionary=False)
    reader = opened(tmp_path / "in.parquet")
    assert 5 < len(reader.shards) <= 50
    assert read(reader)["prompt"].to_pylist() == texts


def test_a_large_nested_row_group_is_streamed(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": f"{i:06d}" + "x" * 20_000}] for i in range(1000)]
    pq.write_table(pa.table({"messages": messages}), tmp_path / "in.parquet", row_group_size=1000, use_dictionary=False)
    reader = opened(tmp_path / "in.parquet", rows_per_shard=100)
    seen = 0
    for rows in reader.read(reader.shards):
        for record in rows.records:
            assert record.columns["messages"][0]["content"].startswith(f"{seen:06d}")
            seen += 1
    assert seen == 1000


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 100}), path)
    reader = opened(path, rows_per_shard=10)
    for texts in (["a"] * 50, ["a"] * 60 + ["b"] * 40):
        pq.write_table(pa.table({"prompt": texts}), path)
        with pytest.raises(ValueError, match=r"in\.parquet: the file changed"):
            list(reader.read(reader.shards[5:]))

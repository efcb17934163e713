"""JSON lines: the written rule of every type at any depth, lines that every reader agrees on, and what has no rule refused."""

from __future__ import annotations

import gzip
import json
import math
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from pipeline.writer import OutputOptions, PartWriter


def write(folder: Path, table: pa.Table, **options: Any) -> bytes:
    writer = PartWriter(OutputOptions(path=str(folder), format="jsonl", **options), schema=table.schema)
    writer.write(folder / "part-00000.jsonl", table)
    return (folder / "part-00000.jsonl").read_bytes()


def column(folder: Path, array: pa.Array, **options: Any) -> list[Any]:
    """What ``array`` becomes as the column ``x``."""
    lines = write(folder, pa.table({"x": array}), **options).decode("utf-8").splitlines()
    return [json.loads(line)["x"] for line in lines]


def test_every_type_by_its_rule(tmp_path: Path, every_type) -> None:
    for name, typed in every_type.items():
        assert column(tmp_path, pa.array(typed.values, typed.type)) == typed.json, name


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([0, 253_402_300_799, 253_402_300_800], pa.timestamp("s")), ["1970-01-01T00:00:00", "9999-12-31T23:59:59", None]),
        (pa.array([2**62, -62_135_596_800, -62_135_596_801], pa.timestamp("s")), [None, "0001-01-01T00:00:00", None]),
        (pa.array([2**63 - 1], pa.timestamp("ns")), ["2262-04-11T23:47:16.854775807"]),
        (pa.array([2_932_896, 2_932_897, -719_163], pa.date32()), ["9999-12-31", None, None]),
        (pa.array([0], pa.timestamp("s", "Mars/Olympus")), ["1970-01-01T00:00:00Z"]),
        (pa.array([86_400_000], pa.date64()), ["1970-01-02"]),
        (pa.array([86_400_005, -1, 253_402_300_800_000], pa.int64()).view(pa.date64()), ["1970-01-02", "1969-12-31", None]),
        (pa.array([3661], pa.time32("s")), ["01:01:01"]),
        (pa.array([-1, 10**18], pa.duration("ns")), ["PT-0.000000001S", "PT1000000000.000000000S"]),
        (pa.array(["a", None, "a"]).dictionary_encode().cast(pa.dictionary(pa.int32(), pa.large_string())), ["a", None, "a"]),
        (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", None]), ["a", "a", None]),
        (pa.array([b"0123456789abcdef", None], pa.uuid()), ["MDEyMzQ1Njc4OWFiY2RlZg==", None]),
        (pa.array([[1], None, []], pa.list_view(pa.int8())), [[1], None, []]),
        (pa.array([{}, None], pa.struct([])), [{}, None]),
        (pa.Array.from_buffers(pa.string(), 2, [None, *pa.array([b"ok", b"\xc3("], pa.binary()).buffers()[1:]]), ["ok", "\ufffd("]),
    ],
)
def test_types_that_only_arrow_files_bring(tmp_path: Path, array: pa.Array, expected: list[Any]) -> None:
    assert column(tmp_path, array) == expected


def as_json(value: Any) -> Any:
    """The rule, one value at a time."""
    if isinstance(value, dict):
        return {key: as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        if value and isinstance(value[0], tuple):
            return [{"key": as_json(key), "value": as_json(inner)} for key, inner in value]
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value.isoformat() if isinstance(value, date) else value


LEAVES = st.sampled_from(
    [(pa.int64(), st.integers(-(2**63), 2**63 - 1)), (pa.float64(), st.floats()), (pa.string(), st.text()), (pa.date32(), st.dates())]
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def wrap(typed: tuple[pa.DataType, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
        kind, values = typed
        some = values | st.none()
        return st.sampled_from(
            [
                (pa.list_(kind), st.lists(some, max_size=3)),
                (pa.large_list(kind), st.lists(some, max_size=3)),
                (pa.list_(kind, 2), st.lists(some, min_size=2, max_size=2)),
                (pa.struct({"a": kind, "b": pa.int8()}), st.fixed_dictionaries({"a": some, "b": st.none() | st.integers(-5, 5)})),
                (pa.map_(pa.string(), kind), st.lists(st.tuples(st.text(max_size=2), some), max_size=3)),
            ]
        )

    return inner.flatmap(wrap)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_nesting_in_any_slice(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    kind, values = data.draw(st.recursive(LEAVES, nested, max_leaves=3))
    rows = data.draw(st.lists(values | st.none(), min_size=1, max_size=8))
    start = data.draw(st.integers(0, len(rows) - 1))
    array = pa.array(rows, kind)[start:]
    assert column(tmp_path_factory.mktemp("jsonl"), array, batch_bytes=data.draw(st.integers(1, 100))) == [
        as_json(row) for row in array.to_pylist()
    ]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (pa.month_day_nano_interval(), "JSON has no form for month_day_nano_interval"),
        (pa.list_(pa.dense_union([pa.field("a", pa.int8())])), "JSON has no form for dense_union"),
        (pa.struct([("a", pa.int8()), ("a", pa.int8())]), "two fields of one name"),
    ],
)
def test_a_type_without_a_rule_is_refused_with_its_column(tmp_path: Path, kind: pa.DataType, words: str) -> None:
    schema = pa.schema({"fine": pa.int64(), "odd one": kind})
    with pytest.raises(ValueError, match=rf"^output\.format: the column 'odd one' .*{words}.*input\.columns"):
        PartWriter(OutputOptions(path=str(tmp_path), format="jsonl"), schema=schema)


def test_a_line_is_a_line_for_every_reader(tmp_path: Path) -> None:
    texts = [f"a{mark}b" for mark in "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\0\x7f"] + ["naïve 🚀"]
    written = write(tmp_path, pa.table({"x": texts}))
    assert [json.loads(line)["x"] for line in written.decode("utf-8").splitlines()] == texts
    assert "naïve 🚀".encode() in written and written.endswith(b"}\n")


@pytest.mark.parametrize(
    ("compression", "ending", "unpack"),
    [
        ("auto", ".jsonl", bytes),
        ("none", ".jsonl", bytes),
        ("gzip", ".jsonl.gz", gzip.decompress),
        ("zstd", ".jsonl.zst", lambda data: zstandard.ZstdDecompressor().stream_reader(data).read()),
    ],
)
def test_compressed_parts_say_so_and_go_on_after_a_stop(
    run_job, write_jsonl, tmp_path, scripted_engine, compression, ending, unpack
) -> None:
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(20)])
    output = {"format": "jsonl", "compression": compression}
    run_job(path, output=output, engine=scripted_engine(stop_after=12))
    first = (tmp_path / "out" / f"part-00000{ending}").stat().st_mtime_ns
    summary = run_job(path, output=output)
    assert summary.num_resumed >= 8
    assert (tmp_path / "out" / f"part-00000{ending}").stat().st_mtime_ns == first
    rows = [json.loads(line) for i in range(3) for line in unpack((tmp_path / "out" / f"part-{i:05d}{ending}").read_bytes()).splitlines()]
    assert [row["generation"] for row in rows] == [f"{i} row" for i in range(20)]
    files = f"{tmp_path}/out/part-*{ending}"
    # JSON has no types: datasets takes a column that is null in the first file for null in all, unless it is told.
    features = datasets.Features({name: datasets.Value("string") for name in rows[0]})
    loaded = datasets.load_dataset("json", data_files=files, features=features, split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["generation"][:] == [f"{i} row" for i in range(20)]

"""JSONL: what is a line, what is a row, and which Arrow type a column gets."""

from __future__ import annotations

import bz2
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from pipeline.reader import InputOptions, Reader, open_reader
from pipeline.types import Record


def opened(path: Path, *, limit: int | None = None, **options: Any) -> Reader:
    return open_reader(InputOptions(format="jsonl", path=str(path), **options), prompt_columns=["prompt"], limit=limit)


def read(reader: Reader) -> tuple[pa.Table, list[Record]]:
    tables, records = [], []
    for rows in reader.read(reader.shards):
        tables.append(rows.table)
        records += list(rows.records)
    return pa.concat_tables(tables), records


def written(folder: Path, data: bytes, name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


PLAIN = b'{"id": 0, "prompt": "a"}\n{"id": 1, "prompt": "\xc3\xa4"}\n'


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        PLAIN.rstrip(b"\n"),
        b"\xef\xbb\xbf" + PLAIN,
        PLAIN.replace(b"\n", b"\r\n"),
        b"\n \n" + PLAIN.replace(b"\n", b"\n\n\t\n"),
    ],
    ids=["plain", "no last newline", "bom", "crlf", "blank lines"],
)
def test_the_same_rows_whatever_is_around_them(tmp_path: Path, data: bytes) -> None:
    table, records = read(opened(written(tmp_path, data)))
    assert table.to_pylist() == [{"id": 0, "prompt": "a"}, {"id": 1, "prompt": "ä"}]
    assert [record.row_key for record in records] == ["in.jsonl:0", "in.jsonl:1"]
    assert [dict(record.columns) for record in records] == table.to_pylist()


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
@pytest.mark.parametrize(
    "packed",
    [
        PLAIN,
        gzip.compress(PLAIN),
        gzip.compress(PLAIN[:10]) + gzip.compress(PLAIN[10:]),
        zstandard.compress(PLAIN),
        zstandard.compress(PLAIN[:10]) + zstandard.compress(PLAIN[10:]),
        bz2.compress(PLAIN),
    ],
    ids=["plain", "gzip", "gzip members", "zstd", "zstd frames", "bzip2"],
)
def test_compression_is_told_by_content(tmp_path: Path, packed: bytes, name: str) -> None:
    table, _ = read(opened(written(tmp_path, packed, name)))
    assert table["prompt"].to_pylist() == ["a", "ä"]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress, bz2.compress])
def test_a_cut_compressed_file_is_refused_by_name(tmp_path: Path, compress: Any) -> None:
    packed = compress(b"".join(b'{"prompt": "%d"}\n' % (i * i) for i in range(5000)))
    with pytest.raises(ValueError, match=r"in\.jsonl: the compressed file is cut short"):
        opened(written(tmp_path, packed[: len(packed) // 2]))


def test_lines_end_at_0x0a_only(tmp_path: Path) -> None:
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0bb\x0cc\x1cd", "plain"]
    data = "".join('{"prompt": "' + json.dumps(text, ensure_ascii=False)[1:-1] + '"}\n' for text in texts)
    table, _ = read(opened(written(tmp_path, data.encode())))
    assert table["prompt"].to_pylist() == texts


def test_a_line_of_megabytes_is_a_row(tmp_path: Path) -> None:
    big = "x" * (3 << 20)
    table, _ = read(opened(written(tmp_path, b'{"prompt": "a"}\n{"prompt": "%s"}\n{"prompt": "b"}\n' % big.encode())))
    assert table["prompt"].to_pylist() == ["a", big, "b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{no json", "no JSON"),
        (b'{"prompt": "a"}{"prompt": "b"}', "no JSON"),
        (b'"text"', "not an object but str"),
        (b"null", "not an object but NoneType"),
        (b'{"prompt": NaN}', "NaN is not allowed"),
        (b'{"prompt": -Infinity}', "-Infinity is not allowed"),
        (b'{"prompt": 1e999}', "out of range"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "BOM"),
        (b'{"prompt": ' + b"[" * 100_000, "recursion"),
        (b'{"prompt": ' + b'{"a": [' * 70 + b"]}" * 70 + b"}", "nested more than 128 deep"),
        (b'{"prompt": "half \\ud83d pair"}', "surrogate"),
        (b'{"\\udc00": 1, "prompt": "x"}', "surrogate"),
        (b'{"a\\u0000b": 1, "prompt": "x"}', "a key has a NUL"),
        (b'{"prompt": [{"\\u0000": 1}]}', "a key has a NUL"),
    ],
)
def test_a_line_that_is_no_object_is_an_error_row_with_its_line_number(tmp_path: Path, line: bytes, words: str) -> None:
    data = b'{"prompt": "before"}\n\n' + line + b'\n{"prompt": "after"}\n'
    table, records = read(opened(written(tmp_path, data), rows_per_shard=1))
    assert [record.error is None for record in records] == [True, False, True]
    assert records[1].error is not None
    assert records[1].error.code == "bad_row"
    assert f"{tmp_path / 'in.jsonl'}, line 3: " in records[1].error.message
    assert words in records[1].error.message
    assert table["prompt"].to_pylist()[::2] == ["before", "after"]


def test_half_surrogates_are_carried_as_replacement_characters(tmp_path: Path) -> None:
    data = b'{"id": "\\ud800", "prompt": "a"}\n{"id": "\\ud83d\\udc4b", "prompt": "b"}\n'
    table, records = read(opened(written(tmp_path, data)))
    assert table["id"].to_pylist() == ["\ufffd", "\U0001f44b"]
    assert [record.error is None for record in records] == [False, True]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(ValueError, match="UTF-32" if "32" in encoding else "UTF-16"):
        opened(written(tmp_path, PLAIN.decode().encode(encoding)))


@pytest.mark.parametrize("data", [b'[{"prompt": "a"}, {"prompt": "b"}]', b'\n[\n  {\n    "prompt": "a"\n  }\n]\n'])
def test_an_array_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ValueError, match="JSON array, want one object a line"):
        opened(written(tmp_path, data))


def test_a_file_without_one_object_is_refused_with_its_first_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"in\.jsonl, line 2: no JSON"):
        opened(written(tmp_path, b"\nhello\nworld\n"))


@pytest.mark.parametrize(
    ("values", "kind", "carried"),
    [
        ([None, "a", None], pa.string(), [None, "a", None]),
        ([None, None], pa.string(), [None, None]),
        ([1, None, 2**53 + 1], pa.int64(), [1, None, 2**53 + 1]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([True, None], pa.bool_(), [True, None]),
        (["2024-01-01", "2024-01-01T00:00:00Z"], pa.string(), ["2024-01-01", "2024-01-01T00:00:00Z"]),
        ([2**63, 1], pa.string(), [str(2**63), "1"]),
        ([2**53 + 1, 0.5], pa.string(), [str(2**53 + 1), "0.5"]),
        ([True, 1], pa.string(), ["true", "1"]),
        (["a", 1, [1, "x"], {"k": "ä"}], pa.string(), ["a", "1", '[1, "x"]', '{"k": "ä"}']),
        ([{}, None], pa.string(), ["{}", None]),
        ([[], [None], [1]], pa.list_(pa.int64()), [[], [None], [1]]),
        ([[1, "a"], ["b"]], pa.list_(pa.string()), [["1", "a"], ["b"]]),
        (
            [{"a": 1}, {"b": {"c": "x"}}],
            pa.struct({"a": pa.int64(), "b": pa.struct({"c": pa.string()})}),
            [{"a": 1, "b": None}, {"a": None, "b": {"c": "x"}}],
        ),
        ([{"a": 1}, {"a": "x", "b": 0}], pa.struct({"a": pa.string(), "b": pa.int64()}), [{"a": "1", "b": None}, {"a": "x", "b": 0}]),
    ],
)
def test_column_types_follow_the_written_rule(tmp_path: Path, values: list[Any], kind: pa.DataType, carried: list[Any]) -> None:
    data = "".join(json.dumps({"prompt": "p", "extra": value}) + "\n" for value in values).encode()
    reader = opened(written(tmp_path, data), rows_per_shard=1)
    table, records = read(reader)
    assert reader.schema.field("extra").type == kind
    assert table["extra"].to_pylist() == carried
    assert [record.columns["extra"] for record in records] == values, "prompts see the values as they were written"


@pytest.mark.parametrize("depth", [31, 32, 100])
def test_deep_values_go_through_an_arrow_file(tmp_path: Path, depth: int) -> None:
    """Types of more than 64 levels can be made but not written; from the 32nd level on a value is its JSON text."""
    data = b'{"prompt": "p", "extra": ' + b"[" * depth + b"1" + b"]" * depth + b"}\n"
    table, _ = read(opened(written(tmp_path, data)))
    with pa.BufferOutputStream() as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    value = pa.ipc.open_file(sink.getvalue()).read_all()["extra"].to_pylist()[0]
    for _ in range(min(depth, 32)):
        (value,) = value
    assert value == 1 if depth <= 32 else json.loads(value) == json.loads("[" * (depth - 32) + "1" + "]" * (depth - 32))


def test_an_object_with_ever_new_keys_is_text(tmp_path: Path) -> None:
    data = "".join(json.dumps({"prompt": "p", "extra": {f"k{i}": i}}) + "\n" for i in range(300)).encode()
    table, _ = read(opened(written(tmp_path, data)))
    assert table["extra"].to_pylist() == [f'{{"k{i}": {i}}}' for i in range(300)]


def test_a_repeated_key_counts_with_its_last_value_and_keys_may_differ(tmp_path: Path) -> None:
    table, _ = read(opened(written(tmp_path, b'{"prompt": "first", "prompt": "second"}\n{"link": "x", "prompt": "b"}\n')))
    assert table.to_pylist() == [{"prompt": "second", "link": None}, {"prompt": "b", "link": "x"}]


KEYS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=2)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def same(value: Any, carried: Any) -> bool:
    """``carried`` holds ``value``: equal, or its JSON text, at any depth; keys that were not there are null."""
    if isinstance(value, dict) and isinstance(carried, dict):
        return value.keys() <= carried.keys() and all(same(value.get(key), item) for key, item in carried.items())
    if isinstance(value, list) and isinstance(carried, list):
        return len(value) == len(carried) and all(same(one, other) for one, other in zip(value, carried, strict=True))
    if isinstance(carried, str) and not isinstance(value, str):
        return json.loads(carried) == value
    if isinstance(value, (int, float)) and isinstance(carried, float):
        return math.isclose(value, carried, rel_tol=0, abs_tol=0)
    return type(value) is type(carried) and value == carried


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["a", "b", ""]), JSON_VALUES, max_size=3), min_size=1, max_size=8), size=st.integers(1, 4)
)
def test_any_json_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], size: int) -> None:
    rows = [{"prompt": "p"}, *rows]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table, records = read(opened(written(tmp_path_factory.mktemp("json"), data), rows_per_shard=size))
    assert table.num_rows == len(records) == len(rows)
    for row, carried, record in zip(rows, table.to_pylist(), records, strict=True):
        assert same(row, carried)
        assert {key: value for key, value in record.columns.items() if value is not None} == {
            key: value for key, value in row.items() if value is not None
        }


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_any_shards_can_be_read_alone(tmp_path: Path, compress: Any) -> None:
    data = b"\xef\xbb\xbf" + b"".join(b'{"prompt": "%d"}\n%s' % (i, b"\n" * (i % 3)) for i in range(50))
    reader = opened(written(tmp_path, compress(data)), rows_per_shard=7)
    wanted = reader.shards[1::3]
    texts = [record.columns["prompt"] for rows in reader.read(wanted) for record in rows.records]
    assert texts == [str(i) for shard in wanted for i in range(shard.first_row, shard.first_row + shard.num_rows)]


def test_a_shard_is_cut_by_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.readers._text_rows.SHARD_BYTES", 100)
    sizes = [10, 10, 10, 300, 10, 60, 60]
    path = written(tmp_path, b"".join(b'{"prompt": "%s"}\n' % (b"x" * size) for size in sizes))
    reader = opened(path)
    assert [shard.num_rows for shard in reader.shards] == [3, 1, 2, 1]
    assert [len(text) for text in read(reader)[0]["prompt"].to_pylist()] == sizes


def test_limit_stops_over_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        written(tmp_path, PLAIN, name)
    (tmp_path / "c.jsonl").write_bytes(b"[not read]")
    reader = opened(tmp_path, limit=3)
    assert [record.row_key for record in read(reader)[1]] == ["a.jsonl:0", "a.jsonl:1", "b.jsonl:0"]


def test_the_digest_tells_changed_content(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN)
    before = opened(path, rows_per_shard=1).shards
    path.write_bytes(PLAIN.replace(b"\xc3\xa4", b"\xc3\xb6"))
    after = opened(path, rows_per_shard=1).shards
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress, bz2.compress])
@pytest.mark.parametrize("damage", [b"\xff", b"\xff" * 200], ids=["a byte", "many bytes"])
def test_a_damaged_middle_is_refused_by_name(tmp_path: Path, pack: Any, damage: bytes) -> None:
    packed = pack(b"".join(b'{"prompt": "%d"}\n' % (i * i) for i in range(5000)))
    middle = len(packed) // 2
    with pytest.raises(ValueError, match=r"in\.jsonl: "):
        opened(written(tmp_path, packed[:middle] + damage + packed[middle + len(damage) :]))


def grown(before: bytes, after: bytes, folder: Path, **options: Any) -> tuple[Reader, Reader]:
    first = opened(written(folder, before), **options)
    reader = open_reader(
        InputOptions(format="jsonl", path=str(written(folder, after)), **options), prompt_columns=["prompt"], limit=None, known=first.shards
    )
    return first, reader


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n\n \n"], ids=["no last newline", "newline", "blank lines"])
def test_appended_rows_begin_a_shard_of_their_own(tmp_path: Path, end: bytes) -> None:
    row = b'{"prompt": "a"}'
    first, second = grown(
        b"\n".join([row] * 10) + end, b"\n".join([row] * 10) + b"\r\n\n \n" + b"\n".join([row] * 7), tmp_path, rows_per_shard=4
    )
    assert [shard.num_rows for shard in first.shards] == [4, 4, 2]
    assert list(second.shards[:3]) == list(first.shards)
    assert [(shard.first_row, shard.num_rows) for shard in second.shards[3:]] == [(10, 4), (14, 3)]
    assert read(second)[0].num_rows == 17


def test_a_larger_limit_goes_on_behind_the_rows_of_a_smaller_one(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"prompt": "a"}\n' * 20)
    first = opened(path, rows_per_shard=8, limit=11)
    options = InputOptions(format="jsonl", path=str(path), rows_per_shard=8)
    second = open_reader(options, prompt_columns=["prompt"], limit=None, known=first.shards)
    assert [shard.num_rows for shard in second.shards] == [8, 3, 8, 1]
    assert list(second.shards[:2]) == list(first.shards)


def test_a_known_shard_whose_rows_changed_keeps_its_place_and_shows_another_digest(tmp_path: Path) -> None:
    first, second = grown(b'{"prompt": "a"}\n' * 6, b'{"prompt": "a"}\n' * 3 + b'{"prompt": "b"}\n' * 5, tmp_path, rows_per_shard=4)
    assert [(shard.first_row, shard.num_rows) for shard in second.shards] == [(0, 4), (4, 2), (6, 2)]
    assert [before == after for before, after in zip(first.shards, second.shards, strict=False)] == [False, False]


def test_only_the_chosen_columns_are_read(tmp_path: Path) -> None:
    table, records = read(opened(written(tmp_path, PLAIN), columns=("prompt",)))
    assert table.column_names == ["prompt"]
    assert list(records[0].columns) == ["prompt"]
    with pytest.raises(ValueError, match=r"input\.columns: the input has no column 'text'"):
        opened(tmp_path / "in.jsonl", columns=("prompt", "text"))


@pytest.mark.parametrize("data", [PLAIN.replace(b'"id": 1', b'"id": []'), PLAIN[:20], b""])
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, PLAIN * 2)
    reader = opened(path, rows_per_shard=1)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"in\.jsonl: the file changed"):
        list(reader.read([reader.shards[0], reader.shards[1], reader.shards[3]]))


def test_a_change_of_one_value_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN)
    reader = opened(path)
    path.write_bytes(PLAIN.replace(b'"a"', b'"b"'))
    with pytest.raises(ValueError, match=r"in\.jsonl: the file changed"):
        list(reader.read(reader.shards))

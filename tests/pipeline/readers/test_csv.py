"""CSV: what is a row, where a quote ends, and that every column is text."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from pipeline.reader import InputOptions, Reader, open_reader
from pipeline.types import Record


def opened(path: Path, **options: Any) -> Reader:
    return open_reader(InputOptions(format="csv", path=str(path), **options), prompt_columns=["prompt"], limit=None)


def written(folder: Path, data: bytes, name: str = "in.csv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def read(reader: Reader) -> tuple[list[dict[str, Any]], list[Record]]:
    seen = list(reader.read(reader.shards))
    return pa.concat_tables(rows.table for rows in seen).to_pylist(), [record for rows in seen for record in rows.records]


PLAIN = b'id,prompt\n007,"a, ""b"""\n1.10,2024-01-01\n'
ROWS = [{"id": "007", "prompt": 'a, "b"'}, {"id": "1.10", "prompt": "2024-01-01"}]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress, lambda data: b"\xef\xbb\xbf" + data])
@pytest.mark.parametrize(
    "data",
    [PLAIN, PLAIN.rstrip(), PLAIN.replace(b"\n", b"\r\n"), PLAIN.replace(b"\n", b"\n\r\n\n"), PLAIN.replace(b"007", b'"007"')],
    ids=["plain", "no last newline", "crlf", "blank lines", "quoted"],
)
def test_the_same_texts_whatever_is_around_them(tmp_path: Path, data: bytes, pack: Any) -> None:
    path = written(tmp_path, pack(data))
    assert opened(path).schema == pa.schema({"id": pa.string(), "prompt": pa.string()})
    for size in (1, 2):
        table, records = read(opened(path, rows_per_shard=size))
        assert table == ROWS
        assert [dict(record.columns) for record in records] == ROWS
        assert [record.row_key for record in records] == ["in.csv:0", "in.csv:1"]


def test_a_quoted_field_keeps_its_line_ends(tmp_path: Path) -> None:
    path = written(tmp_path, b'prompt,n\r\n"a\r\n\nb\n",1\r\n"c\xe2\x80\xa8d",2\r\n')
    rows = [{"prompt": "a\r\n\nb\n", "n": "1"}, {"prompt": "c\u2028d", "n": "2"}]
    assert read(opened(path, rows_per_shard=1))[0] == rows


def test_tabs_where_the_ending_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(b"id\tprompt\n1\ta,b\n"), "in.tsv.gz")
    assert read(opened(path))[0] == [{"id": "1", "prompt": "a,b"}]


def test_an_empty_field_is_null_and_a_field_of_megabytes_is_a_field(tmp_path: Path) -> None:
    big = "x" * (3 << 20)
    path = written(tmp_path, f'id,prompt\n,{big}\n"",b\n'.encode())
    assert read(opened(path))[0] == [{"id": None, "prompt": big}, {"id": None, "prompt": "b"}]


def test_files_are_joined_by_the_names_in_their_headers(tmp_path: Path) -> None:
    written(tmp_path, b"id,prompt\n1,a\n", "a.csv")
    written(tmp_path, b"prompt,extra\nb,x\n", "b.csv")
    rows = [{"id": "1", "prompt": "a", "extra": None}, {"id": None, "prompt": "b", "extra": "x"}]
    assert read(opened(tmp_path))[0] == rows


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (b"1", "1 fields, but the header has 2"),
        (b"1,2,3", "3 fields, but the header has 2"),
        (b'"a"b,2', "expected after"),
        (b"1,\xff", "no UTF-8"),
        (b'1,"\n\n\xff"', "no UTF-8"),
    ],
)
def test_a_row_that_does_not_fit_is_an_error_row_with_its_line(tmp_path: Path, row: bytes, words: str) -> None:
    path = written(tmp_path, b'id,prompt\n1,"before\n"\n\n' + row + b"\n2,after\n")
    _, records = read(opened(path, rows_per_shard=1))
    assert [record.error is None for record in records] == [True, False, True]
    assert records[1].error is not None
    assert records[1].error.code == "bad_row"
    assert f"{path}, line 5: " in records[1].error.message
    assert words in records[1].error.message
    assert records[2].columns == {"id": "2", "prompt": "after"}


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, b'id,prompt\n1,a\n2,"open\n' + b"3,b\n" * 1000)
    _, records = read(opened(path))
    assert [record.error is None for record in records] == [True, False]
    monkeypatch.setattr("pipeline.readers.csv.SHARD_BYTES", 1000)
    with pytest.raises(ValueError, match=r"in\.csv, line 3: a quote that is open here"):
        opened(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"id;prompt\n1;a\n", "one column, 'id;prompt'"),
        (b"id\tprompt\n1\ta\n", "one column"),
        (b"prompt,id,prompt\n", "'prompt' is there twice"),
        (b"prompt,\xff\n", "no UTF-8"),
        (b"prompt,a\x00b\n", "NUL"),
        (b'"prompt\n', "unexpected end of data"),
        ("prompt\na\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_a_header_that_cannot_be_read_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=rf"in\.csv.*{words}"):
        opened(written(tmp_path, data))

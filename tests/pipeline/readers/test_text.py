"""Text files: one row each, whatever is in them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from pipeline.reader import InputOptions, open_reader

TEXTS = {"a.md": "# Title\r\n\nbody\n", "sub/b.txt": "\u2028\x00", "sub/c.txt.gz": "packed", "z.md": ""}


def test_every_file_is_a_row(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = (b"\xef\xbb\xbf" if name == "a.md" else b"") + text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (tmp_path / "no.py").touch()
    reader = open_reader(InputOptions(format="text", path=str(tmp_path)), prompt_columns=["text"], limit=None)
    seen = list(reader.read(reader.shards))
    assert [row for rows in seen for row in rows.table.to_pylist()] == [{"text": text, "file": name} for name, text in TEXTS.items()]
    assert [record.row_key for rows in seen for record in rows.records] == [f"{name}:0" for name in TEXTS]
    assert len({shard.digest for shard in reader.shards}) == len(TEXTS)


def test_a_file_that_is_no_utf8_is_an_error_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff")
    (tmp_path / "b.txt").write_bytes(b"ok")
    reader = open_reader(InputOptions(format="text", path=str(tmp_path)), prompt_columns=["text"], limit=None)
    records = [record for rows in reader.read(reader.shards) for record in rows.records]
    assert [record.error and record.error.code for record in records] == ["bad_row", None]
    assert [record.columns["text"] for record in records] == ["ok \ufffd", "ok"]


def test_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(ValueError, match=r"a\.txt: the file is UTF-16"):
        open_reader(InputOptions(format="text", path=str(tmp_path)), prompt_columns=["text"], limit=None)

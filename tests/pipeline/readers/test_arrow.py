"""Arrow IPC: files and streams are told apart by content, and damaged values are row errors."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from pipeline.reader import InputOptions, Reader, open_reader


def opened(path: Path, **options: Any) -> Reader:
    return open_reader(InputOptions(format="arrow", path=str(path), **options), prompt_columns=["prompt"], limit=None)


def read(reader: Reader) -> pa.Table:
    return pa.concat_tables(rows.table for rows in reader.read(reader.shards))


def written(path: Path, table: pa.Table, *, new: Any = pa.ipc.new_file, batch: int = 1000) -> Path:
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_dictionaries_that_grow_between_batches(tmp_path: Path, new: Any) -> None:
    chunks = [pa.array(["a", "b"]).dictionary_encode(), pa.array(["a", "b", "a"]).dictionary_encode()]
    table = pa.table({"prompt": ["p"] * 5, "kind": pa.chunked_array(chunks)})
    path = written(tmp_path / "in.arrow", table, new=new)
    for size in (1, 2, 5):
        carried = read(opened(path, rows_per_shard=size))
        assert carried.schema == table.schema
        assert carried.to_pylist() == table.to_pylist()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (lambda start: pa.DictionaryArray.from_arrays([0, 1], ["a", None]), "nulls"),
        (
            lambda start: pa.array([f"{start}.{i}" for i in range(100)]).dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string())),
            "index",
        ),
        (lambda start: pa.DictionaryArray.from_arrays([0], pa.array([[start]])), "not implemented"),
    ],
)
def test_dictionaries_that_cannot_be_one_are_refused_before_rows_are_read(tmp_path: Path, words: Any, reason: str) -> None:
    kind = pa.chunked_array([words(1), words(2)])
    path = written(tmp_path / "in.arrow", pa.table({"prompt": ["p"] * len(kind), "kind": kind}), new=pa.ipc.new_stream)
    with pytest.raises(ValueError, match=rf"in\.arrow: the dictionaries of 'kind' differ .*{reason}.*input\.columns"):
        opened(path)
    assert read(opened(path, columns=["prompt"])).num_rows == len(kind)


def test_an_extension_type_is_carried(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "key": pa.array([b"0" * 16, None], pa.uuid())})
    assert read(opened(written(tmp_path / "in.arrow", table))).equals(table)


def test_a_text_in_a_dictionary_that_is_no_utf8_makes_error_rows(tmp_path: Path) -> None:
    offsets = pa.array([0, *itertools.accumulate([2, 1])], pa.int32())
    words = pa.Array.from_buffers(pa.string(), 2, [None, offsets.buffers()[1], pa.py_buffer(b"ok\xff")])
    table = pa.table({"prompt": pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), words)})
    (rows,) = opened(written(tmp_path / "in.arrow", table)).read(opened(tmp_path / "in.arrow").shards)
    assert [record.error and record.error.code for record in rows.records] == [None, "bad_row", None]
    assert rows.table.schema == table.schema
    assert rows.table["prompt"].to_pylist() == ["ok", "\ufffd", "ok"]


def test_a_large_batch_is_cut_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.readers._table_rows.SHARD_BYTES", 10_000)
    table = pa.table({"prompt": [str(i % 10) * 1000 for i in range(100)]})
    reader = opened(written(tmp_path / "in.arrow", table))
    assert {shard.num_rows for shard in reader.shards[:-1]} == {9}
    assert read(reader).equals(table)


def test_the_cache_files_of_datasets(tmp_path: Path) -> None:
    rows = {"prompt": ["a", "b", "c"], "label": [0, 1, 0]}
    features = datasets.Features({"prompt": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved", num_shards=2)
    table = read(opened(tmp_path / "saved"))
    assert table.to_pydict() == rows


@pytest.mark.parametrize("data", [b"", b"ARROW1", b'{"prompt": "a"}\n'])
def test_a_file_that_is_no_arrow_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in.arrow").write_bytes(data)
    with pytest.raises(ValueError, match=r"in\.arrow: cannot be read as Arrow IPC"):
        opened(tmp_path / "in.arrow")


FLIPS = """
import sys
from pathlib import Path
from pipeline.reader import InputOptions, open_reader
data = Path(sys.argv[1]).read_bytes()
num_refused = 0
for place in range(0, len(data), 5):
    path = Path(sys.argv[1]).with_name(f"{place}.arrow")
    path.write_bytes(data[:place] + bytes([data[place] ^ 0x44]) + data[place + 1 :])
    try:
        reader = open_reader(InputOptions(format="arrow", path=str(path)), prompt_columns=["prompt"], limit=None)
        for rows in reader.read(reader.shards):
            list(rows.records)
    except ValueError as error:
        assert str(path) in str(error) or "input.path" in str(error), error
        num_refused += 1
print(num_refused)
"""


def test_a_flipped_bit_never_ends_the_process(tmp_path: Path) -> None:
    words = pa.array(["x", "y"] * 20).dictionary_encode()
    texts, lists = [f"p{i}" * (i % 5) for i in range(40)], [["a"] * (i % 3) for i in range(40)]
    path = written(tmp_path / "in.arrow", pa.table({"prompt": texts, "lists": lists, "words": words}), batch=16)
    done = subprocess.run([sys.executable, "-c", FLIPS, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100

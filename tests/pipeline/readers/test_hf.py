"""Hugging Face data sets, from local folders: which split is meant, and that its rows and types are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.reader import InputOptions, Reader, open_reader

MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
TABLE = pa.table(
    {
        "id": range(700),
        "prompt": [f"p{i}" for i in range(700)],
        "messages": pa.array([[{"role": "user", "content": "x"}] * (i % 3) for i in range(700)], MESSAGES),
    }
)


def opened(path: Path | str, **options: Any) -> Reader:
    settings = {key: options.pop(key) for key in ("known", "output_path") if key in options}
    return open_reader(InputOptions(format="hf", path=str(path), **options), prompt_columns=["prompt"], limit=None, **settings)


def read(reader: Reader) -> pa.Table:
    return pa.concat_tables(rows.table for rows in reader.read(reader.shards))


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    folder = tmp_path / "both"
    folder.mkdir()
    pq.write_table(TABLE, folder / "train.parquet", row_group_size=100)
    pq.write_table(TABLE.slice(0, 3), folder / "test.parquet")
    return folder


def test_a_split_of_a_folder(splits: Path) -> None:
    reader = opened(f"{splits}::train", rows_per_shard=300)
    assert read(reader).equals(TABLE)
    assert [shard.num_rows for shard in reader.shards] == [300, 300, 100]
    (middle,) = reader.read(reader.shards[1:2])
    assert middle.table.equals(TABLE.slice(300, 300))
    first = next(iter(middle.records))
    assert (first.row_key, first.columns["prompt"]) == ("both::train:300", "p300")
    assert read(opened(f"{splits}:default:test")).equals(TABLE.slice(0, 3))


def test_one_split_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
    assert read(opened(path)).equals(TABLE)
    datasets.Dataset.from_dict(TABLE.to_pydict()).save_to_disk(tmp_path / "saved")
    assert read(opened(tmp_path / "saved")).to_pylist() == TABLE.to_pylist()


def test_what_was_saved_in_splits(tmp_path: Path) -> None:
    whole = datasets.Dataset(TABLE)
    datasets.DatasetDict({"a": whole.select(range(2)), "b": whole.select(range(2, 5))}).save_to_disk(tmp_path / "saved")
    assert read(opened(f"{tmp_path / 'saved'}::b"))["id"].to_pylist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "which split? Name one of test, train|which split? Name one of train, test"),
        ("::nope", "there is no split 'nope'"),
        (":nope:train", "nope"),
        ("/missing", "there is no file or folder .*hf://OWNER/NAME"),
    ],
)
def test_what_is_not_there_is_refused(splits: Path, path: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"input\.path: .*({words.replace('?', '[?]')})"):
        opened(f"{splits}{path}")


def test_an_output_folder_inside_is_refused(splits: Path) -> None:
    with pytest.raises(ValueError, match=r"output\.path: .* lies in input\.path"):
        opened(f"{splits}::train", output_path=str(splits / "out"))


def test_appended_rows_begin_a_shard_of_their_own(splits: Path) -> None:
    first = opened(f"{splits}::test")
    pq.write_table(TABLE.slice(0, 5), splits / "test.parquet")
    second = opened(f"{splits}::test", known=first.shards)
    assert [shard.num_rows for shard in second.shards] == [3, 2]
    assert second.shards[0] == first.shards[0]


def test_what_has_no_row_is_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(tmp_path / "saved")
    (tmp_path / "in.jsonl").touch()
    for name in ("saved", "in.jsonl"):
        with pytest.raises(ValueError, match=rf"^input\.path: {tmp_path}/{name}"):
            opened(tmp_path / name)

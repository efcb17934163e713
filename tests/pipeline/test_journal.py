"""The working part: whatever a crash leaves of it, what is still read is right, whole rows, and all that came before the cut."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.journal import Journal
from pipeline.types import Shard

SHARD = Shard(file="a.jsonl", first_row=0, num_rows=9, start=0, stop=99, first_line=1, digest="d")
SCHEMA = pa.schema(
    {"sample_index": pa.int16(), "text": pa.string(), "scores": pa.list_(pa.float32()), "top": pa.list_(pa.list_(pa.int32()))}
)


def answers(row: int, *, num_samples: int = 2) -> list[dict[str, Any]]:
    return [
        {"sample_index": sample, "text": None if row == 3 else f"é{row} " * row, "scores": [0.5] * row, "top": [[sample, row], None]}
        for sample in range(num_samples)
    ]


def journal(path: Path, *, shard: Shard = SHARD) -> Journal:
    return Journal(path, shard=shard, schema=SCHEMA)


def found(path: Path) -> dict[int, Any]:
    """What the file gives, from a copy: to take over is to write."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    reading = journal(copy)
    rows = dict(reading.take_over())
    reading.close()
    return rows


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[int]]:
    """A journal of five rows, a flush each, and its length after each flush."""
    path, sizes = tmp_path / "part-00000.tmp", [0]
    writing = journal(path)
    for row in range(5):
        writing.add(row, answers(row))
        writing.flush()
        sizes.append(path.stat().st_size)
    writing.close()
    return path, sizes


def test_every_cut_gives_all_rows_of_the_flushes_before_it(written, tmp_path: Path) -> None:
    path, sizes = written
    data = path.read_bytes()
    near = {size + offset for size in sizes for offset in (-8, -1, 0, 1, 8)}
    for length in sorted(near & set(range(len(data) + 1)) | set(range(0, len(data), 61))):
        path.write_bytes(data[:length])
        taking = journal(path)
        found = taking.take_over()
        taking.close()
        num_flushed = sum(size <= length for size in sizes[1:])
        assert {row: list(rows) for row, rows in found.items()} == {row: answers(row) for row in range(num_flushed)}
        assert not list(tmp_path.glob("*.new"))


def test_a_flipped_bit_never_gives_a_wrong_row(written) -> None:
    path, _ = written
    data = path.read_bytes()
    dice = random.Random(0)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(damaged)
        taking = journal(path)
        for row, rows in taking.take_over().items():
            assert list(rows) == answers(row)
        taking.close()


def test_what_was_taken_over_is_kept_and_goes_on(written) -> None:
    path, sizes = written
    path.write_bytes(path.read_bytes()[: sizes[3] + 11])
    for row in range(3, 9):  # each time another process
        going_on = journal(path)
        assert sorted(going_on.take_over()) == list(range(row))
        assert sorted(found(path)) == list(range(row)), "it is on the disk at once: the old file is gone"
        going_on.add(row, answers(row))
        going_on.flush()
        going_on.close()
    last = journal(path)
    assert {row: list(rows) for row, rows in last.take_over().items()} == {row: answers(row) for row in range(9)}
    last.close()


def test_rows_of_another_shard_are_not_taken(written) -> None:
    path, _ = written
    for change in ({"digest": "e"}, {"first_row": 9}, {"num_rows": 8}, {"file": "b.jsonl"}):
        assert journal(path, shard=replace(SHARD, **change)).take_over() == {}
    assert len(journal(path).take_over()) == 5


def test_nothing_is_on_the_disk_before_a_flush_and_much_flushes_itself(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.tmp"
    writing = journal(path)
    writing.add(0, answers(0))
    assert not path.exists()
    writing.add(1, [{"sample_index": 0, "text": "x" * 2**20}])
    assert sorted(journal(path).take_over()) == [0, 1]
    writing.close()

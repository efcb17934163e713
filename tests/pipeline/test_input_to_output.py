"""Inputs that break other batch software, through the whole pipeline: every row has its place, its prompt and its columns."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MESSAGES = pa.struct({"role": pa.string(), "content": pa.string()})


def test_a_line_of_megabytes_is_one_row_that_is_too_long(run_job, read_parts, write_jsonl) -> None:
    run_job(write_jsonl([{"prompt": "a"}, {"prompt": "x" * (3 << 20)}, {"prompt": "b"}]))
    assert read_parts()["error_code"].to_pylist() == [None, "too_long", None]


def test_a_column_that_is_null_for_megabytes_and_then_text(run_job, read_parts, write_jsonl) -> None:
    notes = [None] * 14_000 + ["late"] * 10
    rows = [{"prompt": f"question {i}", "note": note, **({} if note is None else {"system": note})} for i, note in enumerate(notes)]
    run_job(write_jsonl(rows), input={"rows_per_shard": 4096})
    table = read_parts()
    assert table["note"].to_pylist() == table["system"].to_pylist() == notes
    assert table["error_code"].null_count == len(notes)


def test_keys_that_differ_and_texts_that_look_like_dates(run_job, read_parts, write_jsonl) -> None:
    rows = [
        '{"id": "2024-01-01", "prompt": "2024-01-01T00:00:00"}',
        '{"prompt": "1.0", "id": "007", "extra": {"deep": [1]}}',
        '{"prompt": "old", "prompt": "true", "id": "null"}',
    ]
    run_job(write_jsonl(rows))
    table = read_parts()
    assert table["row_id"].to_pylist() == ["2024-01-01", "007", "null"]
    assert table["prompt"].to_pylist() == table["generation"].to_pylist() == ["2024-01-01T00:00:00", "1.0", "true"]
    assert table["extra"].to_pylist() == [None, {"deep": [1]}, None]


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.parametrize("nested", [pa.list_, pa.large_list])
def test_conversations_in_parquet(run_job, read_parts, tmp_path: Path, nested, group: int) -> None:
    values = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "One"}],
        [],
        None,
        [{"role": "user", "content": None}],
        [None],
    ]
    pq.write_table(pa.table({"messages": pa.array(values, nested(MESSAGES))}), tmp_path / "in.parquet", row_group_size=group)
    run_job(tmp_path / "in.parquet", output={"token_ids": True})
    table = read_parts()
    assert table["error_code"].to_pylist() == [None, None, "empty_prompt", "empty_prompt", "bad_row", "bad_row"]
    assert [bytes(ids).decode() for ids in table["prompt_token_ids"].to_pylist()[:2]] == [
        "[system] Be brief.\n[user] Hi\n[assistant] ",
        "[user] One\n[assistant] ",
    ]


def test_files_whose_types_differ_give_equal_prompts(run_job, read_parts, tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    prompts = [
        pa.array(["hello"]),
        pa.array(["hello"], pa.large_string()),
        pa.array(["hello"]).dictionary_encode(),
        pa.array([b"hello"], pa.binary()),
        pa.array(["hello"], pa.string_view()),
    ]
    for index, prompt in enumerate(prompts):
        table = pa.table({"id": pa.array([index], pa.int32() if index % 2 else pa.int64()), "prompt": prompt})
        extra = pa.array([Decimal("1.10")]) if index == 3 else None
        pq.write_table(table if extra is None else table.append_column("extra", extra), tmp_path / "ds" / f"{index}.parquet")
    run_job(tmp_path / "ds", input={"format": "parquet"}, output={"token_ids": True})
    table = read_parts()
    assert table["row_id"].to_pylist() == ["0", "1", "2", "3", "4"]
    assert [bytes(ids) for ids in table["prompt_token_ids"].to_pylist()] == [b"hello"] * 5
    assert table["extra"].to_pylist() == [None, None, None, Decimal("1.10"), None]


def test_carried_columns_keep_type_and_value(run_job, read_parts, tmp_path: Path) -> None:
    carried = pa.table(
        {
            "prompt": ["a", "b"],
            "price": pa.array([Decimal("1.10"), None], pa.decimal128(12, 2)),
            "at": pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5, 6), None], pa.timestamp("us", tz="Europe/Prague")),
            "clock": pa.array([datetime.time(1, 2, 3), None], pa.time64("us")),
            "blob": pa.array([b"\xff\x00", None], pa.binary()),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
            "kind": pa.array(["u", None]).dictionary_encode(),
            "whole": pa.array([2**53 + 1, None], pa.int64()),
        }
    )
    pq.write_table(carried, tmp_path / "in.parquet")
    run_job(tmp_path / "in.parquet")
    assert read_parts().select(carried.column_names).equals(carried)


def test_text_that_is_no_utf8_costs_its_own_row_only(run_job, read_parts, tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    damaged = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffc")])
    pq.write_table(pa.table({"id": ["1", "2", "3"], "prompt": damaged}), tmp_path / "in.parquet")
    run_job(tmp_path / "in.parquet")
    table = read_parts()
    assert table["error_code"].to_pylist() == [None, "bad_row", None]
    assert table["prompt"].to_pylist() == ["a", "\ufffd", "c"]
    errors = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert [error["row_id"] for error in errors] == ["2"]

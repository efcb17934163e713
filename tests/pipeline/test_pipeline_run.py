"""The whole pipeline with a scripted engine: every row comes out once, in order, with its own answer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import RunError


def reversed_words(prompt: str) -> str:
    return " ".join(reversed(prompt.split(" ")))


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "prompt": f"row {i} " + "word " * (i * 7 % 40) + "end", "tag": i % 3} for i in range(count)]


def test_rows_come_out_in_input_order_with_their_own_answers(run_job, read_parts, write_jsonl) -> None:
    rows = prompts(100)
    summary = run_job(write_jsonl(rows))
    table = read_parts()
    assert (summary.num_rows, summary.num_ok, summary.num_errors, summary.stopped) == (100, 100, 0, None)
    assert table["row_id"].to_pylist() == [row["id"] for row in rows]
    assert table["row_key"].to_pylist() == [f"in.jsonl:{i}" for i in range(100)]
    assert table["generation"].to_pylist() == [reversed_words(row["prompt"]) for row in rows]
    assert table["tag"].to_pylist() == [row["tag"] for row in rows]


def test_jsonl_and_parquet_give_equal_output(run_job, read_parts, write_jsonl, tmp_path) -> None:
    rows = prompts(50)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=7)
    run_job(write_jsonl(rows), out="a")
    run_job(tmp_path / "in.parquet", out="b")
    assert read_parts("a").drop(["row_key"]).equals(read_parts("b").drop(["row_key"]))


@pytest.mark.parametrize("max_waiting", [1, 5, 1000])
def test_run_ahead_is_bounded_by_the_oldest_open_shard(run_job, read_parts, write_jsonl, scripted_engine, max_waiting, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.runner.MAX_OPEN_ROWS", 32)

    class Starving(scripted_engine):
        """Never answers the first row while it has another one."""

        def order(self, waiting):
            return sorted(waiting, key=lambda request: request.id == "in.jsonl:0")

    engine = Starving(max_waiting=max_waiting)
    rows = prompts(200)
    summary = run_job(write_jsonl(rows), engine=engine)
    assert summary.num_ok == 200
    assert engine.most_in_flight <= 4 * 8
    assert read_parts()["generation"].to_pylist() == [reversed_words(row["prompt"]) for row in rows]


def test_shards_of_one_row_keep_the_engine_busy(run_job, write_jsonl, scripted_engine) -> None:
    engine = scripted_engine(max_waiting=64)
    assert run_job(write_jsonl(prompts(200)), engine=engine, input={"rows_per_shard": 1}).num_ok == 200
    assert engine.most_in_flight == 64


def test_a_large_shard_leaves_the_engine_asking_before_each_step(run_job, write_jsonl, scripted_engine, monkeypatch) -> None:
    """An engine that has all that it takes asks no more, and then nobody looks at the clock."""
    monkeypatch.setattr("pipeline.runner.MAX_IN_FLIGHT", 16)
    engine = scripted_engine(max_waiting=64)
    assert run_job(write_jsonl(prompts(200)), engine=engine, input={"rows_per_shard": 200}).num_ok == 200
    assert engine.most_in_flight == 16


def test_bad_rows_are_rows(run_job, read_parts, write_jsonl, tmp_path) -> None:
    rows = [
        {"id": 1, "prompt": "one two"},
        "{no json",
        {"id": 3, "prompt": ""},
        {"id": 4, "prompt": "x " * 5000},
        {"id": 5, "prompt": "x", "sampling_params": {"temprature": 1}},
        {"id": 6},
        {"id": 7, "prompt": "fine row"},
    ]
    summary = run_job(write_jsonl(rows))
    table = read_parts()
    codes = [None, "bad_row", "empty_prompt", "too_long", "bad_params", "empty_prompt", None]
    assert table["error_code"].to_pylist() == codes
    assert table["status"].to_pylist() == ["ok" if code is None else "error" for code in codes]
    assert table["finish_reason"].to_pylist()[1:6] == ["error"] * 5
    assert [text is None for text in table["generation"].to_pylist()] == [code is not None for code in codes]
    assert (summary.num_ok, summary.num_errors) == (2, 5)
    messages = table["error_message"].to_pylist()
    assert "in.jsonl, line 2" in messages[1]
    assert "temprature" in messages[4]
    errors = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert [(error["row_key"], error["error_code"]) for error in errors] == [
        (f"in.jsonl:{i}", code) for i, code in enumerate(codes) if code is not None
    ]


def test_rows_that_cannot_be_asked_leave_the_others_alone(run_job, read_parts, write_jsonl, text_job) -> None:
    user = {"role": "user", "content": "good day"}
    rows = [
        ({"messages": [user]}, None),
        ({"messages": [{"role": "user", "content": "template, refuse"}]}, "template_error"),
        ({"messages": [user, {"role": "assistant", "content": "well"}]}, "bad_row"),
        ({"messages": [{"role": "system", "content": "Be brief."}]}, "bad_row"),
        ({"messages": []}, "empty_prompt"),
        ({"prompt": "   "}, None),
        ({"prompt": ""}, "empty_prompt"),
        ({"prompt": "a", "sampling_params": {"temprature": 0.5}}, "bad_params"),
        ({"prompt": "a", "sampling_params": {"n": 0}}, "bad_params"),
        ({"prompt": "a", "sampling_params": {"top_k": 10**9}}, None),
        ({"prompt": "a", "messages": [user]}, "bad_row"),
        ({"prompt": "last"}, None),
    ]
    run_job(write_jsonl([row for row, _ in rows]), job=text_job(chat=True))
    table = read_parts()
    assert table["error_code"].to_pylist() == [code for _, code in rows]
    assert [text is None for text in table["generation"].to_pylist()] == [code is not None for _, code in rows]
    assert "no such words here" in table["error_message"][1].as_py()


def test_shards_of_nothing_but_errors_do_not_stop_the_job(run_job, read_parts, write_jsonl) -> None:
    rows = [{"id": i, "prompt": "" if 5 <= i < 90 else "fine"} for i in range(100)]
    summary = run_job(write_jsonl(rows))
    assert (summary.num_ok, summary.num_errors) == (15, 85)
    assert read_parts()["id"].to_pylist() == list(range(100))


def test_whatever_one_row_does_to_its_handling_is_its_own_error(run_job, read_parts, write_jsonl, text_job, tmp_path) -> None:
    class Fragile(type(text_job())):
        def request(self, record, *, prompt_token_ids):
            if record.columns["tag"] == "ask":
                raise KeyError("no such thing")
            return super().request(record, prompt_token_ids=prompt_token_ids)

        def answer(self, completion):
            if completion.text == "answer":
                raise ZeroDivisionError("by nothing")
            return super().answer(completion)

    rows = [{"id": i, "prompt": "answer" if i == 4 else f"row {i}", "tag": "ask" if i == 2 else None} for i in range(20)]
    summary = run_job(write_jsonl(rows), job=Fragile(text_job().prompts))
    table = read_parts()
    assert (summary.num_ok, summary.num_errors) == (18, 2)
    assert [i for i, code in enumerate(table["error_code"].to_pylist()) if code == "bad_row"] == [2, 4]
    assert "KeyError: 'no such thing'" in table["error_message"][2].as_py()
    assert "ZeroDivisionError: by nothing" in table["error_message"][4].as_py()


def test_an_id_that_cannot_be_read_is_its_rows_error(run_job, read_parts, tmp_path) -> None:
    ids = pa.array([0, 10**12, 1], pa.timestamp("s"))  # the second is in the year 33658, which Python does not know
    pq.write_table(pa.table({"id": ids, "prompt": ["x", "y", "z"]}), tmp_path / "in.parquet")
    run_job(tmp_path / "in.parquet")
    table = read_parts()
    assert table["row_id"].to_pylist() == ["1970-01-01 00:00:00", "in.parquet:1", "1970-01-01 00:00:01"]
    assert table["error_code"].to_pylist() == [None, "bad_row", None]


def test_an_input_that_goes_away_breaks_the_run_off(run_job, read_parts, write_jsonl, tmp_path, scripted_engine, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.runner.MAX_AHEAD_ROWS", 1)  # or all would be read before
    for name in "abcdefgh":
        write_jsonl(prompts(8), f"in/{name}.jsonl")
    run_job(tmp_path / "in", out="whole")

    class Vanishing(scripted_engine):
        def generate(self, requests):
            (tmp_path / "in" / "g.jsonl").rename(tmp_path / "away")
            return super().generate(requests)

    with pytest.raises(RunError, match=r"g\.jsonl"):
        run_job(tmp_path / "in", engine=Vanishing(max_waiting=4))
    (tmp_path / "away").rename(tmp_path / "in" / "g.jsonl")
    assert run_job(tmp_path / "in").num_resumed > 0
    assert read_parts().equals(read_parts("whole"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc")
def test_memory_is_flat_over_many_rows(run_job, tmp_path, scripted_engine, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.runner.MAX_OPEN_ROWS", 512)
    num_rows, row_bytes = 10_000, 8000
    with (tmp_path / "in.jsonl").open("w") as stream:
        for i in range(num_rows):
            stream.write(json.dumps({"id": i, "prompt": f"row {i}", "blob": f"{i:08d}" * (row_bytes // 8)}) + "\n")

    class Measuring(scripted_engine):
        def generate(self, requests):
            for count, completion in enumerate(super().generate(requests)):
                if count in (num_rows // 6, num_rows * 5 // 6):
                    sizes.append(resident_bytes())
                yield completion

    sizes: list[int] = []
    run_job(tmp_path / "in.jsonl", engine=Measuring(), input={"rows_per_shard": 128})
    assert sizes[1] - sizes[0] < 0.25 * num_rows * row_bytes, "53 MB of rows came and went between the two"

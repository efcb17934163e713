"""Inputs that are known to break batch software, through the whole pipeline; skipped where the case folders are absent."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"


@pytest.fixture
def case():
    def find(name: str) -> Path:
        if not CASES.is_dir():
            pytest.skip(f"no case folders at {CASES}")
        return CASES / name

    return find


def codes(table: pa.Table) -> list[str | None]:
    return table["error_code"].to_pylist()


def texts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("003-generation-prompt/input.jsonl", {"ends-user": None, "ends-assistant": "bad_row", "system-only": "bad_row"}),
        ("010-null-content/input.jsonl", {"null-tool": None, "null-user": "bad_row", "missing": "bad_row", "number": "bad_row"}),
        (
            "051-empty-prompt/input.jsonl",
            dict.fromkeys(("empty", "no-ids", "null", "absent"), "empty_prompt") | {"both": "bad_row", "ok": None, "blank": None},
        ),
        ("090-lone-surrogates/input.jsonl", {"1": "bad_row", "2": "bad_row", "\ufffd": "bad_row", "4": None, "5": None}),
    ],
)
def test_each_row_by_its_id(case, run_job, read_parts, text_job, name: str, expected: dict[str, str | None]) -> None:
    run_job(case(name), job=text_job(chat=True))
    table = read_parts()
    found = dict(zip(table["row_id"].to_pylist(), codes(table), strict=True))
    assert {row_id: found[row_id] for row_id in expected} == expected
    assert "None" not in " ".join(text or "" for text in table["generation"].to_pylist())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("070-bom/bom.jsonl", [None] * 4),
        ("070-bom/bom-middle.jsonl", [None, None, "bad_row", None]),
        ("071-unicode-line-marks/input.jsonl", [None] * 5),
        ("073-very-long-line/input.jsonl", [None, "too_long", None]),
        ("076-keys-differ-per-row/input.jsonl", [None] * 4),
        ("077-strings-that-look-like-dates/input.jsonl", [None] * 2),
        ("079-array-not-lines/scalar.jsonl", ["bad_row"] * 3 + [None]),
        ("085-compressed/ok.jsonl.gz", [None] * 4),
        ("085-compressed/ok.jsonl.zst", [None] * 4),
        ("085-compressed/ok.jsonl.bz2", [None] * 4),
        ("085-compressed/not-gz.jsonl.gz", [None] * 4),
        ("085-compressed/two-members.jsonl.gz", [None] * 8),
        ("094-duplicate-ids/input.jsonl", None),
        ("103-equal-prompts/input.jsonl", [None] * 6),
    ],
)
def test_every_row_has_its_place(case, run_job, read_parts, name: str, expected: list[str | None] | None) -> None:
    run_job(case(name))
    table = read_parts()
    if expected is None:
        expected = [None] * sum(1 for line in case(name).read_bytes().split(b"\n") if line.strip())
    assert codes(table) == expected
    assert table["row_key"].to_pylist() == [f"{case(name).name}:{i}" for i in range(len(expected))]


def test_the_same_rows_and_types_with_a_byte_order_mark(case, run_job, read_parts) -> None:
    run_job(case("070-bom/plain.jsonl"), out="plain")
    run_job(case("070-bom/bom.jsonl"), out="bom")
    assert read_parts("plain").drop(["row_key"]).equals(read_parts("bom").drop(["row_key"]))


def test_unicode_line_marks_stay_in_their_strings(case, run_job, read_parts) -> None:
    run_job(case("071-unicode-line-marks/input.jsonl"))
    assert read_parts()["prompt"].to_pylist() == texts(case("071-unicode-line-marks/input.jsonl"))


def test_a_late_string_after_nulls_is_kept(case, run_job, read_parts) -> None:
    run_job(case("074-null-then-string/input.jsonl"), input={"rows_per_shard": 4096})
    rows = [json.loads(line) for line in case("074-null-then-string/input.jsonl").read_text().splitlines()]
    table = read_parts()
    assert table["note"].to_pylist() == [row.get("note") for row in rows]
    assert codes(table) == [None] * len(rows)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("070-bom/utf16.jsonl", "UTF-16"),
        ("079-array-not-lines/array.jsonl", "JSON array, want one object a line"),
        ("079-array-not-lines/pretty.json", "JSON array, want one object a line"),
        ("079-array-not-lines/two-on-a-line.jsonl", "line 1: no JSON"),
        ("082-parquet-shards-differ/ds/*.parquet", r"g\.parquet has none of the columns"),
        ("085-compressed/truncated.jsonl.gz", r"truncated\.jsonl\.gz: the compressed file is cut short"),
        ("093-column-clash/input.jsonl", r"output\.prefix.*'finish_reason'"),
    ],
)
def test_refused_before_any_load(case, run_job, name: str, words: str) -> None:
    class Unloadable:
        @property
        def stats(self):
            raise AssertionError("no engine may be loaded")

    with pytest.raises(ValueError, match=words):
        run_job(case(name), engine=Unloadable())


def test_messages_without_a_template_are_refused(case, run_job, text_job, tokenizer) -> None:
    job = text_job()
    tokenizer.has_chat_template = False
    with pytest.raises(ValueError, match=r"model\.chat_template"):
        run_job(case("011-no-template/input.jsonl"), job=job)


@pytest.mark.parametrize("name", ["plain", "large", "many-groups"])
def test_parquet_messages(case, run_job, read_parts, name: str) -> None:
    run_job(case(f"080-parquet-messages/{name}.parquet"), output={"token_ids": True})
    table = read_parts()
    assert codes(table) == [None, None, "empty_prompt", "empty_prompt", "bad_row", "bad_row"]
    prompts = [bytes(ids).decode() for ids in table["prompt_token_ids"].to_pylist()[:2]]
    assert prompts == ["[system] Be brief.\n[user] Hi\n[assistant] ", "[user] One\n[assistant] "]


def test_parquet_files_that_differ_give_equal_prompts(case, run_job, read_parts) -> None:
    run_job(case("082-parquet-shards-differ/ds") / "[a-f].parquet", output={"token_ids": True})
    table = read_parts()
    assert table["row_id"].to_pylist() == ["1", "2", "3", "4", "5", "6"]
    assert table["prompt_token_ids"].to_pylist() == [list(b"hello")] * 6
    assert [None if value is None else str(value) for value in table["extra"].to_pylist()] == [None] * 4 + ["1.10", None]


def test_carried_parquet_columns_keep_type_and_value(case, run_job, read_parts) -> None:
    path = case("087-carried-column-types/input.parquet")
    run_job(path)
    before, after = pq.ParquetFile(path).read(), read_parts()
    assert [after.schema.field(name).type for name in before.column_names] == before.schema.types
    assert repr(after.select(before.column_names).to_pylist()) == repr(before.to_pylist())


def test_batches_are_cut_by_bytes(case, run_job, read_parts, tmp_path) -> None:
    run_job(case("089-offset-overflow/input.jsonl"), output={"batch_bytes": 65536}, input={"rows_per_shard": 1024})
    with pa.OSFile(str(tmp_path / "out" / "part-00000.arrow")) as file, pa.ipc.open_file(file) as reader:
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    assert len(batches) > 1
    assert all(batch.nbytes <= 65536 or batch.num_rows == 1 for batch in batches)


@pytest.mark.parametrize("name", ["095-order/input.jsonl", "099-one-bad-row/input.jsonl", "100-whole-batch-fails/input.jsonl"])
def test_answers_sit_with_their_own_prompts_in_two_runs(case, run_job, read_parts, scripted_engine, name: str) -> None:
    engine = scripted_engine(max_waiting=7)
    tables = []
    for out in ("first", "second"):
        run_job(case(name), out=out, engine=engine)
        tables.append(read_parts(out))
    assert tables[0].equals(tables[1])
    prompts, answers = tables[0]["prompt"].to_pylist(), tables[0]["generation"].to_pylist()
    assert prompts == texts(case(name))
    for prompt, answer, code in zip(prompts, answers, codes(tables[0]), strict=True):
        assert answer == (None if code else " ".join(reversed(prompt.split(" "))))

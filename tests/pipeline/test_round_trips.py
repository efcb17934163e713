"""Every reader with every writer: what a user brings comes out with equal values and types, whatever the two formats are."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types.chat import ChatCompletion

from engine import plugins

IDS = ["a", "b", "c"]
PROMPTS = ["one two", "", "three"]
ANSWERS = ["two one", None, "three"]  # nothing can be asked with an empty prompt


class Given(NamedTuple):
    """An input: where it is, the table that it holds, the same rows in JSON, the columns that say a row's prompt and its id, and the
    answers to expect."""

    path: Path
    table: pa.Table
    json: list[dict[str, Any]]
    prompt: str = "prompt"
    id: str = "id"
    answers: Sequence[str | None] = ANSWERS


def arrow_table(every_type: Mapping[str, Any]) -> tuple[pa.Table, list[dict[str, Any]]]:
    names = ["id", "prompt", *every_type]
    columns = [pa.array(IDS), pa.array(PROMPTS), *(pa.array(column.values, column.type) for column in every_type.values())]
    json_columns = [IDS, PROMPTS, *(column.json for column in every_type.values())]
    return pa.table(columns, names=names), [dict(zip(names, row, strict=True)) for row in zip(*json_columns, strict=True)]


def in_parquet(folder: Path, every_type: Mapping[str, Any]) -> Given:
    table, rows = arrow_table(every_type)
    pq.write_table(table, folder / "in.parquet")
    return Given(folder / "in.parquet", table, rows)


def in_arrow(folder: Path, every_type: Mapping[str, Any]) -> Given:
    table, rows = arrow_table(every_type)
    with pa.OSFile(str(folder / "in.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return Given(folder / "in.arrow", table, rows)


def in_jsonl(folder: Path, every_type: Mapping[str, Any]) -> Given:
    types = {
        "flag": pa.bool_(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "text": pa.string(),
        "list": pa.list_(pa.int64()),
        "turns": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    }
    rows = [
        dict(zip(("id", "prompt", *types), row, strict=True))
        for row in zip(IDS, PROMPTS, *(every_type[n].json for n in types), strict=True)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    schema = pa.schema({"id": pa.string(), "prompt": pa.string(), **types})
    return Given(folder / "in.jsonl", pa.Table.from_pylist(rows, schema=schema), rows)


def in_csv(folder: Path, every_type: Mapping[str, Any]) -> Given:
    texts = every_type["text"].values
    with (folder / "in.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([("id", "prompt", "text"), *zip(IDS, PROMPTS, texts, strict=True)])
    rows = [{"id": key, "prompt": prompt or None, "text": text or None} for key, prompt, text in zip(IDS, PROMPTS, texts, strict=True)]
    return Given(folder / "in.csv", pa.Table.from_pylist(rows), rows)


def in_hf(folder: Path, every_type: Mapping[str, Any]) -> Given:
    names = (
        "flag",
        "int64",
        "uint64",
        "float32",
        "text",
        "large_text",
        "binary",
        "decimal",
        "date",
        "moment_zone",
        "duration",
        "list",
        "struct",
        "turns",
    )
    table, rows = arrow_table({name: every_type[name] for name in names})
    pq.write_table(table, folder / "in.parquet")
    return Given(folder / "in.parquet", table, rows)


def in_openai_batch(folder: Path, every_type: Mapping[str, Any]) -> Given:
    asked = [[{"role": "user", "content": prompt}] if prompt else [] for prompt in PROMPTS]
    bodies = [{"model": "any", "messages": messages, "max_tokens": 5} for messages in asked]
    lines = [
        {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": body} for key, body in zip(IDS, bodies, strict=True)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    turns = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    schema = pa.schema([("id", pa.string()), ("model", pa.string()), ("messages", turns)])
    for name in ("tools", "response_format", "sampling_params"):
        schema = schema.append(pa.field(name, pa.string()))
    given = {"model": "any", "tools": None, "response_format": None, "sampling_params": '{"max_tokens": 5}'}
    rows = [{"id": key, "messages": messages, **given} for key, messages in zip(IDS, asked, strict=True)]
    answers = [f" {word}\n[assistant] {rest}[user]" for word, rest in (("two", "one "), ("three", ""))]
    return Given(folder / "in.jsonl", pa.Table.from_pylist(rows, schema=schema), rows, answers=[answers[0], None, answers[1]])


def in_text(folder: Path, every_type: Mapping[str, Any]) -> Given:
    (folder / "in").mkdir()
    rows = [{"text": prompt, "file": f"{key}.txt"} for key, prompt in zip(IDS, PROMPTS, strict=True)]
    for row in rows:
        (folder / "in" / row["file"]).write_text(row["text"], encoding="utf-8")
    return Given(folder / "in", pa.Table.from_pylist(rows), rows, prompt="text", id="file")


def arrow_parts(folder: Path) -> pa.Table:
    return pa.concat_tables(pa.ipc.open_file(path.read_bytes()).read_all() for path in sorted(folder.glob("part-*.arrow")))


def parquet_parts(folder: Path) -> pa.Table:
    return pa.concat_tables(pq.ParquetFile(path).read() for path in sorted(folder.glob("part-*.parquet")))


def lines(folder: Path, pattern: str = "part-*.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob(pattern)) for line in path.read_text(encoding="utf-8").splitlines()]


def check_table(read: Callable[[Path], pa.Table]) -> Callable[[Path, Given], None]:
    def check(folder: Path, given: Given) -> None:
        table = read(folder)
        carried = table.select(given.table.column_names)
        assert dict(zip(carried.column_names, carried.schema.types, strict=True)) == dict(
            zip(given.table.column_names, given.table.schema.types, strict=True)
        )
        for name in given.table.column_names:
            assert repr(carried[name].to_pylist()) == repr(given.table[name].to_pylist()), name
        assert table["generation"].to_pylist() == given.answers

    return check


def check_jsonl(folder: Path, given: Given) -> None:
    rows = lines(folder)
    assert [{name: row[name] for name in given.table.column_names} for row in rows] == given.json
    assert [list(row)[: len(given.json[0])] for row in rows] == [given.table.column_names] * len(rows)
    assert [row["generation"] for row in rows] == given.answers


def check_openai_batch(folder: Path, given: Given) -> None:
    rows, failed = lines(folder), lines(folder, "errors-*.jsonl")
    bodies = [ChatCompletion.model_validate(row["response"]["body"], strict=True, by_alias=True) for row in rows]
    one, two, three = given.table[given.id].to_pylist()
    assert [row["custom_id"] for row in rows] == [one, three]
    assert [body.choices[0].message.content for body in bodies] == [given.answers[0], given.answers[2]]
    assert [(row["custom_id"], row["response"], row["error"]["code"]) for row in failed] == [(two, None, "empty_prompt")]


READERS: Mapping[str, Callable[[Path, Mapping[str, Any]], Given]] = {
    "arrow": in_arrow,
    "csv": in_csv,
    "hf": in_hf,
    "jsonl": in_jsonl,
    "openai_batch": in_openai_batch,
    "parquet": in_parquet,
    "text": in_text,
}
WRITERS: Mapping[str, Callable[[Path, Given], None]] = {
    "arrow": check_table(arrow_parts),
    "parquet": check_table(parquet_parts),
    "jsonl": check_jsonl,
    "openai_batch": check_openai_batch,
}


@pytest.mark.parametrize("writer", plugins.names("pipeline.writers"))
@pytest.mark.parametrize("reader", plugins.names("pipeline.readers"))
def test_values_and_types_come_out_as_they_went_in(run_job, text_job, tmp_path, every_type, reader: str, writer: str) -> None:
    assert reader in READERS, "say here how to make an input for this reader"
    given = READERS[reader](tmp_path, every_type)
    job = text_job(template=None if given.prompt == "prompt" else f"{{{{ {given.prompt} }}}}")
    options = {"format": reader, "id_column": given.id, "rows_per_shard": 2}
    summary = run_job(given.path, job=job, input=options, output={"format": writer})
    assert (summary.num_ok, summary.num_errors) == (2, 1)
    WRITERS[writer](tmp_path / "out", given)

"""The Batch API's lines: which field becomes what, and that a field which is not served fails by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import SamplingParams
from pipeline.reader import InputOptions, open_reader
from pipeline.types import Record

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "openai_batch" / "openai_example_batch.jsonl"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def records(write_jsonl: Callable[..., Path]) -> Callable[..., list[Record]]:
    def read(*rows: Any, path: Path | None = None) -> list[Record]:
        options = InputOptions(format="openai_batch", path=str(path or write_jsonl(rows)))
        reader = open_reader(options, prompt_columns=["messages"], limit=None)
        return [record for shard in reader.read(reader.shards) for record in shard.records]

    return read


def line(custom_id: str = "a", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": MESSAGES} | body}


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0, "top_p": 0.5, "n": 2, "seed": 7}, {"temperature": 0, "top_p": 0.5, "n": 2, "seed": 7}),
        ({"stop": "x", "presence_penalty": 1, "frequency_penalty": -1}, {"stop": "x", "presence_penalty": 1, "frequency_penalty": -1}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"logit_bias": {"42": -5}}, {"logit_bias": {42: -5}}),
        ({"top_k": 3, "min_p": 0.1}, {"top_k": 3, "min_p": 0.1}),
        ({"temperature": None, "stream": False, "user": "u", "metadata": {"a": "b"}, "store": True}, {}),
    ],
)
def test_settings_have_the_meaning_of_the_api(records, text_job, body: dict[str, Any], sampling: dict[str, Any]) -> None:
    (record,) = records(line(**body))
    assert record.error is None
    job = text_job(chat=True)
    assert job.request(record, prompt_token_ids=[1]).sampling == SamplingParams.from_mapping(sampling, defaults=job.prompts.defaults)


def test_columns(records) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"const": None}}}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": None}}}
    first, second = records(
        line("1", tools=tools, response_format=form),
        line("2", tools=tools, tool_choice="none", messages=[{"role": "developer", "content": "d"}, *MESSAGES]),
    )
    assert (first.columns["id"], first.columns["model"], first.columns["messages"]) == ("1", "m", MESSAGES)
    assert json.loads(first.columns["tools"]) == tools
    assert json.loads(first.columns["response_format"]) == form, "nulls in a schema mean something"
    assert first.columns["sampling_params"] is None
    assert second.columns["tools"] is None
    assert second.columns["messages"] == [{"role": "system", "content": "d"}, *MESSAGES]


@pytest.mark.parametrize(
    ("row", "code", "field"),
    [
        (line(stream=True), "bad_params", "body.stream"),
        (line(modalities=["text", "audio"]), "bad_params", "body.modalities"),
        (line(audio={"voice": "x"}), "bad_params", "body.audio"),
        (line(tool_choice="required"), "bad_params", "body.tool_choice"),
        (line(parallel_tool_calls=False), "bad_params", "body.parallel_tool_calls"),
        (line(functions=[]), "bad_params", "body.functions"),
        (line(temprature=1), "bad_params", "body.temprature"),
        (line(max_tokens=1, max_completion_tokens=2), "bad_params", "body.max_tokens"),
        (line(top_logprobs=2), "bad_params", "body.top_logprobs"),
        (line(logprobs=2), "bad_params", "body.logprobs"),
        (line() | {"url": "/v1/embeddings"}, "bad_row", "url"),
        (line() | {"method": "GET"}, "bad_row", "method"),
        (line() | {"body": None}, "bad_row", "body"),
        (line() | {"priority": 1}, "bad_row", "priority"),
    ],
)
def test_what_is_not_served_is_an_error_row_that_names_the_field(records, row: dict[str, Any], code: str, field: str) -> None:
    ok, bad = records(line("before"), row)
    assert ok.error is None
    assert bad.error is not None
    assert (bad.error.code, bad.error.message.split(": ")[0]) == (code, field)
    assert bad.columns["id"] == "a", "the row still knows whose answer it is"


def test_requests_run_to_their_answers(run_job, read_parts, text_job, write_jsonl) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    path = write_jsonl([line("1"), line("2", messages=image), line("3", temperature=9e99), "no json", line("4", max_tokens=9)])
    run_job(path, job=text_job(chat=True), input={"format": "openai_batch"})
    table = read_parts()
    assert table["row_id"].to_pylist() == ["1", "2", "3", "in.jsonl:3", "4"]
    assert table["error_code"].to_pylist() == [None, "bad_row", "bad_params", "bad_row", None]
    assert "messages[0].content" in table["error_message"][1].as_py()
    assert "sampling.temperature" in table["error_message"][2].as_py()


def test_the_model_that_rows_name_is_said_to_choose_nothing(records, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        records(line(), line(model="gpt"))
    assert [record.getMessage() for record in caplog.records] == [
        "body.model (gpt, m) chooses no model: the run's own one answers every row"
    ]


def test_a_published_example(records) -> None:
    if not DATA.is_file():
        pytest.skip(f"no example at {DATA}")
    found = records(path=DATA)
    assert [record.error for record in found] == [None, None]
    assert [record.columns["id"] for record in found] == ["request-1", "request-2"]
    assert json.loads(found[0].columns["sampling_params"]) == {"max_tokens": 1000}


def test_where_every_line_is_refused_each_says_why(run_job, read_parts, write_jsonl, text_job) -> None:
    lines = [line(stream=True), line(stream_options={}), line() | {"url": "/v1/embeddings"}, line() | {"body": "hi"}]
    run_job(write_jsonl(lines), job=text_job(chat=True), input={"format": "openai_batch"})
    table = read_parts()
    assert table["error_code"].to_pylist() == ["bad_params", "bad_params", "bad_row", "bad_row"]
    told = table["error_message"].to_pylist()
    assert all(name in message for name, message in zip(["stream", "stream_options", "/v1/embeddings", "body"], told, strict=True))

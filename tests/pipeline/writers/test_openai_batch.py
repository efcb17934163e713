"""Batch API lines: the package's own types take them, samples are choices, and failed rows are in a file of their own."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from openai.types.chat import ChatCompletion

from pipeline import OutputOptions, TextJob
from pipeline.columns import OutputColumns
from pipeline.writer import PartWriter

PROMPTS = ["a b c", "", "one two", "x " * 5000, "tail"]


@pytest.fixture
def run_batch(run_job, write_jsonl):
    def build(rows: list[dict[str, Any]], *, output: dict[str, Any] | None = None, **settings: Any):
        return run_job(write_jsonl(rows), output={"format": "openai_batch", **(output or {})}, **settings)

    return build


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def completion(line: dict[str, Any]) -> ChatCompletion:
    return ChatCompletion.model_validate_json(json.dumps(line["response"]["body"]), strict=True)


def test_the_whole_line(run_batch, tmp_path: Path) -> None:
    run_batch([{"custom_id": "q-1", "prompt": "one two"}], output={"model": "tiny/model"})
    assert lines(tmp_path / "out" / "part-00000.jsonl") == [
        {
            "id": "batch_req_in.jsonl:0",
            "custom_id": "q-1",
            "response": {
                "status_code": 200,
                "request_id": "in.jsonl:0",
                "body": {
                    "id": "chatcmpl-in.jsonl:0",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "tiny/model",
                    "choices": [
                        {
                            "index": 0,
                            "message": {"role": "assistant", "content": "two one", "refusal": None},
                            "logprobs": None,
                            "finish_reason": "length",
                        }
                    ],
                    "usage": {
                        "prompt_tokens": 7,
                        "completion_tokens": 7,
                        "total_tokens": 14,
                        "prompt_tokens_details": {"cached_tokens": 3},
                    },
                },
            },
            "error": None,
        }
    ]


def test_every_row_is_in_one_of_two_files_in_input_order(run_batch, tmp_path: Path) -> None:
    run_batch([{"id": f"r{i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS * 2)], input={"rows_per_shard": 5})
    for part in (0, 1):
        answered, failed = lines(tmp_path / "out" / f"part-{part:05d}.jsonl"), lines(tmp_path / "out" / f"errors-{part:05d}.jsonl")
        assert [line["custom_id"] for line in answered] == [f"r{5 * part + i}" for i in (0, 2, 4)]
        assert [completion(line).choices[0].message.content for line in answered] == ["c b a", "two one", "tail"]
        assert [(line["custom_id"], line["response"]) for line in failed] == [(f"r{5 * part + i}", None) for i in (1, 3)]
        assert [line["error"]["code"] for line in failed] == ["empty_prompt", "too_long"]
        assert failed[1]["error"]["message"] == "10000 tokens, at most 4000 fit"
        assert {tuple(line) for line in answered + failed} == {("id", "custom_id", "response", "error")}


def test_samples_are_choices_and_tokens_are_added_up(run_batch, scripted_engine, tmp_path: Path) -> None:
    class Sampling(scripted_engine):
        """Three samples a request, in falling order."""

        def generate(self, requests):
            for done in super().generate(requests):
                yield from (replace(done, sample_index=index, text=f"{done.text} {index}") for index in (2, 1, 0))

    rows = [{"id": "same", "prompt": f"{i} row", "sampling_params": {"n": 3}} for i in range(20)]
    run_batch(rows, engine=Sampling(), input={"rows_per_shard": 20}, output={"batch_bytes": 300})
    written = lines(tmp_path / "out" / "part-00000.jsonl")
    assert [line["custom_id"] for line in written] == ["same"] * 20
    assert len({line["id"] for line in written}) == 20
    for i, line in enumerate(written):
        body = completion(line)
        assert [(choice.index, choice.message.content) for choice in body.choices] == [(k, f"row {i} {k}") for k in range(3)]
        length = len(f"{i} row")
        assert (body.usage.prompt_tokens, body.usage.completion_tokens, body.usage.total_tokens) == (length, 3 * length, 4 * length)


def test_log_probabilities_stand_beside_token_ids(run_batch, scripted_engine, tmp_path: Path) -> None:
    class Scoring(scripted_engine):
        """Gives the first row a token beside each of its own, one of them impossible."""

        def generate(self, requests):
            for done in super().generate(requests):
                first = done.request_id == "in.jsonl:0"
                yield replace(done, top_logprobs=(((7, -0.25), (8, -math.inf)),) * 2) if first else replace(done, logprobs=())

    run_batch([{"prompt": "ab"}, {"prompt": "cd"}], engine=Scoring(), output={"token_ids": True, "logprobs": True})
    with_, without = (completion(line).choices[0].logprobs for line in lines(tmp_path / "out" / "part-00000.jsonl"))
    assert without is None
    assert [(entry.token, entry.logprob) for entry in with_.content] == [(f"token_id:{ord(letter)}", -0.5) for letter in "ab"]
    assert [(top.token, top.logprob) for top in with_.content[0].top_logprobs] == [("token_id:7", -0.25), ("token_id:8", -9999.0)]


def test_a_prefix_changes_nothing(run_batch, tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    run_batch(rows, out="plain")
    run_batch(rows, out="prefixed", output={"prefix": "p_"})
    for name in ("part-00000.jsonl", "errors-00000.jsonl"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "prefixed" / name).read_bytes()


def test_errors_of_a_part_that_was_never_finished_do_not_outlive_it(tmp_path: Path) -> None:
    columns = OutputColumns(pa.schema({}), fields=(), prefix="", token_ids=False, logprobs=False)
    writer = PartWriter(OutputOptions(path=str(tmp_path), format="openai_batch"), schema=columns.schema)
    numbers = dict.fromkeys(("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens"), 1)
    done = {"row_id": "a", "row_key": "in:0", "status": "ok", "finish_reason": "stop", **numbers}
    bad = {"row_id": "a", "row_key": "in:0", "status": "error", "error_code": "bad_row", "error_message": "odd"}
    for row, names in ((bad, ["errors-00000.jsonl", "part-00000.jsonl.tmp"]), (done, ["part-00000.jsonl.tmp"])):
        writer.write(tmp_path / "part-00000.jsonl.tmp", columns.table(pa.table({"row": [0]}).drop(["row"]), [[row]]))
        assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_starting_over_takes_the_errors_of_all_parts_away(run_batch, tmp_path: Path) -> None:
    run_batch([{"prompt": ""}] * 3, input={"rows_per_shard": 1})
    assert len(list((tmp_path / "out").glob("errors-0*"))) == 3
    run_batch([{"prompt": ""}], resume="force")
    assert [line["error"]["code"] for line in lines(tmp_path / "out" / "errors-00000.jsonl")] == ["empty_prompt"]
    assert (tmp_path / "out" / "part-00000.jsonl").read_bytes() == b""
    assert len(list((tmp_path / "out").glob("errors-0*"))) == 1


def test_what_the_lines_leave_out_is_said(run_batch, text_job, caplog) -> None:
    class Counting(TextJob):
        fields = (pa.field("num_words", pa.int32()),)

    run_batch([{"prompt": "a b", "mine": 1}], job=Counting(text_job().prompts), output={"logprobs": True})
    assert [record.message for record in caplog.records] == [
        "output=openai_batch has no place for num_words, which will not be written",
        "output=openai_batch writes log probabilities beside token ids only; set output.token_ids=true to have them",
    ]

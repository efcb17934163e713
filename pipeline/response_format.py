"""What form a row's answer must have: the row's ``response_format`` column, else the job's ``prompt.response_format``.

Knows how the two are written down; what the forms are is the engine's to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine import Grammar, check_grammar
from pipeline.types import RowError


def job_format(text: str | None) -> Grammar | None:
    """The job's form from its JSON text.

    Raises:
        ValueError: it is no JSON, its shape is wrong, or it does not compile.
    """
    try:
        form = None if text is None else _grammar(text)
    except ValueError as error:
        raise ValueError(f"prompt.{error}") from error
    if form is not None:
        try:
            check_grammar(form)
        except ValueError as error:
            raise ValueError(f"prompt.response_format: {error}") from error
    return form


def row_format(value: Any, *, default: Grammar | None) -> Grammar | None:
    """The form that a row's ``response_format`` asks for; ``default`` where it is null.

    It is a struct or JSON text. A struct has no nulls, since Arrow gives every row the keys of all: a schema that needs
    one (``"const": null``) comes as text.

    Raises:
        RowError: ``bad_params``.
    """
    try:
        return default if value is None else _grammar(value)
    except (ValueError, RecursionError) as error:
        raise RowError("bad_params", str(error)) from error


def _grammar(value: Any) -> Grammar | None:
    if not isinstance(value, (str, bytes)):
        return Grammar.from_response_format(_without_nulls(value))
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ValueError(f"response_format: the text is no JSON: {error}") from error
    return Grammar.from_response_format(parsed)


def _without_nulls(value: Any) -> Any:
    """``value`` without the keys that are null, at any depth; a null in a list stays."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value

"""One JSON object a line, by one strict parser: bytes to Python values, or the reason why a line is none.

Knows lines and JSON, not which keys mean what.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from pipeline.input_files import InputFile
from pipeline.readers._lines import Lines
from pipeline.readers._text_rows import TextRow
from pipeline.types import RowError

_MAX_DEPTH = 128  # far under what Python's own recursion takes
_UNFIT = re.compile(rb"\\u([dD][89a-fA-F]|0000)")  # what may be half of a surrogate pair, or a NUL in a key

# A line's columns, and why the row cannot be served.
Mapped = tuple[dict[str, Any], RowError | None]


class JsonRows:
    """A ``RowParser``: blank lines are skipped, and ``map_row`` turns an object into the row's columns."""

    def __init__(self, map_row: Callable[[dict[str, Any]], Mapped] | None = None) -> None:
        self._map_row = map_row

    def __call__(self, lines: Lines, file: InputFile) -> Iterator[TextRow]:
        is_first = lines.number == 1
        for raw in lines:
            text = raw.rstrip(b"\r\n")
            if not text or text.isspace():
                continue
            number = lines.number - 1
            start = lines.position - len(raw)
            if is_first and text.lstrip().startswith(b"["):
                raise ValueError(f"{file}: JSON array, want one object a line; for example: jq -c '.[]' {file.name}")
            is_first = False
            values, reason = _parsed(text)
            error = None if reason is None else RowError("bad_row", f"{file}, line {number}: {reason}")
            if error is None and self._map_row is not None:
                values, error = self._map_row(values)
            yield TextRow(start, start + len(text), number, text, values, error)


def _parsed(text: bytes) -> tuple[dict[str, Any], str | None]:
    """The line's object, and what is wrong with it; empty where it is none."""
    if text.startswith(codecs.BOM_UTF8):
        return {}, "no JSON: a byte order mark (BOM) belongs at the file's beginning only"
    try:
        value = _DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return {}, f"no JSON: {error}"
    if not isinstance(value, dict):
        return {}, f"not an object but {type(value).__name__}; want one object a line"
    if _is_deep(text, value):
        return {}, f"nested more than {_MAX_DEPTH} deep"
    if _UNFIT.search(text):
        if _has_nul_key(value):
            return {}, "a key has a NUL (\\u0000), which no column name can hold"
        if (repaired := _repaired(value)) is not None:
            return repaired, "half of a surrogate pair (\\ud800 to \\udfff) is no text"
    return value, None


def _is_deep(text: bytes, value: dict[str, Any]) -> bool:
    if text.count(b"[") + text.count(b"{") <= _MAX_DEPTH:
        return False
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inside = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [item for items in inside for item in items]
    return any(isinstance(item, (dict, list)) for item in level)


def _has_nul_key(value: Any) -> bool:
    if isinstance(value, dict):
        return any("\0" in key or _has_nul_key(item) for key, item in value.items())
    return isinstance(value, list) and any(_has_nul_key(item) for item in value)


def _repaired(value: dict[str, Any]) -> dict[str, Any] | None:
    """``value`` with U+FFFD for each half of a surrogate pair; None where there is none."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        repaired: dict[str, Any] = json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
        return repaired
    return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is out of range")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)

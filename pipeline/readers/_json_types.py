"""The Arrow types of JSON values, decided over all rows: the written rule for columns of mixed types.

* null goes with everything; a value that is always null is a string.
* booleans, numbers, strings, lists and objects keep their kind; whole numbers are int64, with a fraction anywhere in the
  column all of them are float64.
* Anything else is text: strings stay as they are, every other value is its JSON text. That holds for mixed kinds, for
  whole numbers outside 64 bits (outside 53 bits beside fractions), for objects with no keys or over 256 of them, and for
  lists and objects inside 32 others (Arrow files hold types of 64 levels at most).
* The rule holds at every depth: inside lists and objects too. A key that a row lacks is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

_MAX_KEYS = 256
_MAX_DEPTH = 32


class JsonType:
    """What has been seen of one column (or list item, or object key) so far."""

    __slots__ = ("depth", "fields", "highest", "item", "kinds", "lowest")

    def __init__(self, *, depth: int = 0) -> None:
        self.depth = depth  # lists and objects around it
        self.kinds: set[type] = set()
        self.lowest = 0
        self.highest = 0
        self.item: JsonType | None = None
        self.fields: dict[str, JsonType] = {}

    def add(self, value: Any) -> None:
        kind = type(value)
        if value is None:
            return
        self.kinds.add(kind)
        if kind is int:
            self.lowest = min(self.lowest, value)
            self.highest = max(self.highest, value)
        elif self.depth == _MAX_DEPTH:
            return
        elif kind is list:
            if self.item is None:
                self.item = JsonType(depth=self.depth + 1)
            for item in value:
                self.item.add(item)
        elif kind is dict and len(self.fields) <= _MAX_KEYS:
            for key, item in value.items():
                if (field := self.fields.get(key)) is None:
                    field = self.fields[key] = JsonType(depth=self.depth + 1)
                field.add(item)

    def arrow(self) -> pa.DataType:
        """The Arrow type that holds everything seen, by the rule above."""
        if self.kinds == {bool}:
            return pa.bool_()
        if self.kinds == {int} and self._whole_within(63):
            return pa.int64()
        if self.kinds in ({float}, {int, float}) and self._whole_within(53):
            return pa.float64()
        if self.kinds == {list} and self.item is not None:
            return pa.list_(self.item.arrow())
        if self.kinds == {dict} and 0 < len(self.fields) <= _MAX_KEYS:
            return pa.struct([pa.field(key, kind.arrow()) for key, kind in self.fields.items()])
        return pa.string()

    def converter(self) -> Callable[[Any], Any] | None:
        """How a value gets the shape that ``arrow()`` takes; None where it has it already."""
        kind = self.arrow()
        if pa.types.is_string(kind):
            return None if self.kinds <= {str} else _as_text
        if pa.types.is_list(kind) and self.item is not None and (inner := self.item.converter()) is not None:
            return lambda value: value if value is None else [inner(item) for item in value]
        if pa.types.is_struct(kind):
            changed = {key: inner for key, field in self.fields.items() if (inner := field.converter()) is not None}
            if changed:
                return lambda value: value if value is None else value | {key: inner(value.get(key)) for key, inner in changed.items()}
        return None

    def _whole_within(self, bits: int) -> bool:
        limit: int = 1 << bits
        return -limit <= self.lowest and self.highest < limit


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)

"""What an Arrow value is in JSON: one rule for every type, applied to whole columns.

Knows nothing of files, parts or jobs. The rules, which `conf/output/jsonl.yaml` tells to users:

* whole numbers and booleans are themselves, all 64 bits of them; floats too, but NaN and the infinities are null, for which JSON
  has no number
* text is text, each malformed UTF-8 sequence in it U+FFFD; bytes are base64
* decimals are text with all their digits
* dates, times and timestamps are ISO 8601 text with all digits of their unit, a timestamp with a zone in UTC with a Z; outside
  the years 1 to 9999, which such text can tell, they are null; a duration is ISO 8601 text in seconds, such as PT1.5S
* a list of any kind is an array, a struct an object, a map an array of {"key": ..., "value": ...}, for keys may be no text
* a dictionary or run-end encoded value is the value itself, an extension type what it is stored as
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

Encode = Callable[[pa.Array], list[Any]]

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}  # behind a second's point
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31, counted from 1970-01-01

# JSON may hold these as they are, but some readers would take them for line ends.
_LINE_MARKS = {mark: f"\\u{ord(mark):04x}" for mark in "\x85\u2028\u2029"}


def encoder(kind: pa.DataType) -> Encode:
    """The function that turns an array of type ``kind`` into as many JSON values.

    Raises:
        TypeError: there is no rule for the type or one inside it, which the message names.
    """
    for holds, make in (*_NESTED, *_LEAVES):
        if holds(kind):
            return make(kind)
    raise TypeError(f"JSON has no form for {kind}")


def json_lines(rows: Iterable[Any]) -> Iterator[str]:
    """One line a value, in any reader's understanding of a line."""
    for row in rows:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        for mark, escaped in _LINE_MARKS.items():
            line = line.replace(mark, escaped)
        yield line + "\n"


def _as_it_is(kind: pa.DataType) -> Encode:
    return lambda array: array.to_pylist()


def _float(kind: pa.DataType) -> Encode:
    def encode(array: pa.Array) -> list[Any]:
        numbers = array.cast(pa.float64())
        finite: list[Any] = pc.if_else(pc.is_finite(numbers), numbers, None).to_pylist()
        return finite

    return encode


def _text(kind: pa.DataType) -> Encode:
    def encode(array: pa.Array) -> list[Any]:
        try:
            texts: list[Any] = array.to_pylist()
        except UnicodeDecodeError:
            texts = [None if value is None else value.decode("utf-8", "replace") for value in array.cast(pa.large_binary()).to_pylist()]
        return texts

    return encode


def _base64(kind: pa.DataType) -> Encode:
    return lambda array: [None if value is None else base64.b64encode(value).decode("ascii") for value in array.to_pylist()]


def _digits(kind: pa.DataType) -> Encode:
    return lambda array: [None if value is None else f"{value:f}" for value in array.to_pylist()]


def _time(kind: pa.DataType) -> Encode:
    return lambda array: array.cast(pa.string()).to_pylist()


def _date(kind: pa.DataType) -> Encode:
    if kind == pa.date64():  # milliseconds, which may be those of any moment of the day
        return lambda array: [None if text is None else text[: len("2024-02-29")] for text in _timestamp(pa.timestamp("ms"))(array)]
    return lambda array: _tellable(array, counts=pa.int32(), per_day=1).cast(pa.string()).to_pylist()


def _timestamp(kind: pa.DataType) -> Encode:
    moment = pa.timestamp(kind.unit)  # what a zone adds is a name only, and Arrow would need a database to know it
    format = "%Y-%m-%dT%H:%M:%S" if kind.tz is None else "%Y-%m-%dT%H:%M:%SZ"
    per_day = 86_400 * 10 ** _DIGITS[kind.unit]
    return lambda array: pc.strftime(_tellable(array.view(moment), counts=pa.int64(), per_day=per_day), format=format).to_pylist()


def _tellable(array: pa.Array, *, counts: pa.DataType, per_day: int) -> pa.Array:
    """``array``, days or parts of them as ``counts``, with null outside the years 1 to 9999: Arrow would write a wrong year there."""
    first, last = _FIRST_DAY * per_day, (_LAST_DAY + 1) * per_day - 1
    numbers = array.view(counts)
    inside = pc.and_(pc.greater_equal(numbers, max(first, -(2**63))), pc.less_equal(numbers, min(last, 2**63 - 1)))
    return pc.if_else(inside, array, None)


def _duration(kind: pa.DataType) -> Encode:
    digits = _DIGITS[kind.unit]

    def encode(array: pa.Array) -> list[Any]:
        return [None if value is None else f"PT{Decimal(value).scaleb(-digits):f}S" for value in array.cast(pa.int64()).to_pylist()]

    return encode


def _list(kind: pa.DataType) -> Encode:
    encode_item = encoder(kind.value_type)

    def encode(array: pa.Array) -> list[Any]:
        return _cut(encode_item(array.flatten()), lengths=pc.list_value_length(array).to_pylist())

    return encode


def _map(kind: pa.DataType) -> Encode:
    plain = pa.list_(pa.struct([pa.field("key", kind.key_type, nullable=False), pa.field("value", kind.item_type)]))
    encode_list = _list(plain)
    return lambda array: encode_list(array.cast(plain))


def _struct(kind: pa.DataType) -> Encode:
    names = [field.name for field in kind]
    if len(set(names)) < len(names):
        raise TypeError(f"a JSON object cannot hold two fields of one name, as in {kind}")
    encoders = [encoder(field.type) for field in kind]

    def encode(array: pa.Array) -> list[Any]:
        columns = [encode_child(child) for encode_child, child in zip(encoders, array.flatten(), strict=True)]
        rows = zip(*columns, strict=True) if columns else ((),) * len(array)
        valid = array.is_valid().to_pylist()
        return [dict(zip(names, row, strict=True)) if is_valid else None for row, is_valid in zip(rows, valid, strict=True)]

    return encode


def _plain(kind: pa.DataType) -> Encode:
    """For a dictionary or run-end encoded type."""
    encode_value = encoder(kind.value_type)
    return lambda array: encode_value(array.dictionary_decode() if types.is_dictionary(kind) else pc.run_end_decode(array))


def _storage(kind: pa.DataType) -> Encode:
    encode_storage = encoder(kind.storage_type)
    return lambda array: encode_storage(array.storage)


def _cut(values: Sequence[Any], *, lengths: Iterable[int | None]) -> list[Any]:
    """``values`` in runs of ``lengths``; a null length is a null list, which has no values."""
    lists: list[Any] = []
    start = 0
    for length in lengths:
        stop = start + (length or 0)
        lists.append(None if length is None else values[start:stop])
        start = stop
    assert start == len(values), "every value belongs to a list"
    return lists


def _any_of(*tests: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda kind: any(test(kind) for test in tests)


_Rule = tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], Encode]]

_NESTED: tuple[_Rule, ...] = (
    (lambda kind: isinstance(kind, pa.BaseExtensionType), _storage),
    (types.is_struct, _struct),
    (types.is_map, _map),
    (_any_of(types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view), _list),
    (_any_of(types.is_dictionary, types.is_run_end_encoded), _plain),
)
_LEAVES: tuple[_Rule, ...] = (
    (_any_of(types.is_null, types.is_boolean, types.is_integer), _as_it_is),
    (types.is_floating, _float),
    (_any_of(types.is_string, types.is_large_string, types.is_string_view), _text),
    (_any_of(types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary), _base64),
    (types.is_decimal, _digits),
    (types.is_date, _date),
    (types.is_time, _time),
    (types.is_timestamp, _timestamp),
    (types.is_duration, _duration),
)

"""Columns that stand in folder names: ``lang=en/year=2024/x.parquet`` has ``lang`` and ``year``.

Knows names only. Values are text, percent signs decoded; a column is int64 where every file's value is a whole number.
``__HIVE_DEFAULT_PARTITION__`` is null.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa

_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")  # written as int64 would be: 007 stays text


def folder_columns(names: Sequence[str]) -> dict[str, pa.Table]:
    """For each file of ``names`` the columns that its folders give, as a table of one row; all files agree on types."""
    found = {name: _pairs(name) for name in names}
    texts: dict[str, list[str]] = {}
    for pairs in found.values():
        for key, text in pairs.items():
            texts.setdefault(key, []).append(text)
    kinds = {key: _kind(seen) for key, seen in texts.items()}
    return {name: pa.table({key: _value(text, kinds[key]) for key, text in pairs.items()}) for name, pairs in found.items()}


def _pairs(name: str) -> dict[str, str]:
    folders = (part.partition("=") for part in name.split("/")[:-1])
    return {unquote(key): unquote(text) for key, equals, text in folders if key and equals}


def _kind(texts: Sequence[str]) -> pa.DataType:
    return pa.int64() if all(text == _NULL or _WHOLE.fullmatch(text) for text in texts) else pa.string()


def _value(text: str, kind: pa.DataType) -> pa.Array:
    value = None if text == _NULL else int(text) if kind == pa.int64() else text
    return pa.array([value], type=kind)

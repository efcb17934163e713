"""One schema for tables that differ, by the written rule, and the tables made to fit it.

A column has one type in all files. Where they differ: numbers and times widen, text with large text is large text,
text with bytes is bytes (prompts are read from them as UTF-8), a dictionary beside its plain values is plain, structs
and lists are joined at every depth. A column that a file lacks is null in its rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa


def chosen(schema: pa.Schema, *, file: str, columns: Sequence[str] | None) -> pa.Schema:
    """``schema`` without its metadata and the columns that nobody asked for.

    Raises:
        ValueError: a column is there twice, or has a NUL in its name; the message names the file.
    """
    names = schema.names
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"{file}: the column {twice[0]!r} is there twice; give every column a name of its own")
    if any("\0" in name for name in names):
        raise ValueError(f"{file}: a column's name has a NUL, which other programs cut there; give it another name")
    return pa.schema([field for field in schema.remove_metadata() if columns is None or field.name in columns])


def refuse_without_prompt(schemas: Mapping[str, pa.Schema], prompt_columns: Sequence[str]) -> None:
    """Raises ValueError with the first file that has no prompt column, where others have one."""
    without = [name for name, schema in schemas.items() if not set(prompt_columns) & set(schema.names)]
    if without and len(without) < len(schemas):
        raise ValueError(
            f"input.path: {without[0]} has none of the columns {', '.join(prompt_columns)}, which other files have; "
            f"its columns are {', '.join(schemas[without[0]].names)}"
        )


def unified(schemas: Mapping[str, pa.Schema]) -> pa.Schema:
    """One schema for all files (name -> schema): columns in the order of their first appearance, types by the module's rule.

    Raises:
        ValueError: no type holds a column of two files; the message names both.
    """
    kinds: dict[str, list[tuple[str, pa.DataType]]] = {}
    for file, schema in schemas.items():
        for field in schema:
            kinds.setdefault(field.name, []).append((file, field.type))
    return pa.schema([pa.field(name, _joined(name, seen)) for name, seen in kinds.items()])


def conformed(batch: pa.RecordBatch, schema: pa.Schema, *, constants: Mapping[str, Any]) -> pa.RecordBatch:
    """``batch`` in ``schema``: columns by name, absent ones constant or null, others cast without loss of values."""
    arrays = [_column(batch, field, constants) for field in schema]
    return pa.record_batch(arrays, schema=schema)


def joined(batches: Sequence[pa.RecordBatch], *, file: str) -> pa.Table:
    """``batches`` as one table whose dictionaries are one a column, which an Arrow file needs.

    Raises:
        ValueError: there is no such dictionary; the message names the columns.
    """
    table = pa.Table.from_batches(batches)
    try:
        return table.unify_dictionaries()
    except pa.ArrowException as error:
        names = [repr(field.name) for field in table.schema if "dictionary" in str(field.type)]
        raise ValueError(
            f"{file}: the dictionaries of {' or '.join(names)} differ and cannot be made one ({error}); "
            "write plain values, or leave the column out with input.columns"
        ) from error


def _column(batch: pa.RecordBatch, field: pa.Field, constants: Mapping[str, Any]) -> pa.Array:
    index = batch.schema.get_field_index(field.name)
    if index < 0:
        return pa.repeat(pa.scalar(constants.get(field.name), type=field.type), batch.num_rows)
    array = batch.column(index)
    return array if array.type == field.type else array.cast(field.type)


def _joined(name: str, seen: Sequence[tuple[str, pa.DataType]]) -> pa.DataType:
    joined = seen[0][1]
    for file, kind in seen[1:]:
        if kind == joined:
            continue
        try:
            both = [pa.schema([pa.field(name, _plain(one))]) for one in (joined, kind)]
            joined = pa.unify_schemas(both, promote_options="permissive").field(name).type
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise ValueError(
                f"input.path: the column {name!r} is {joined} in {seen[0][0]} and {kind} in {file}, which no type holds; "
                "cast one of them, or leave the column out with input.columns"
            ) from error
    return joined


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type without dictionary or view encoding, so that it can be joined with a plain one."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if kind == pa.string_view():
        return pa.large_string()
    return pa.large_binary() if kind == pa.binary_view() else kind

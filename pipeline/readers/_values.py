"""What a table's values are, whatever its layout: a digest of them, and texts that are no UTF-8 mended.

Knows Arrow types; knows no rows, files or formats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def digest(batches: Sequence[pa.RecordBatch]) -> str:
    """A sha256 of names, types and values. Row groups, batch borders, compression and dictionaries do not count."""
    digest = hashlib.sha256()
    for index, field in enumerate(batches[0].schema):
        digest.update(f"{field.name}\0{field.type}\0".encode())
        _add(digest, pa.concat_arrays([_decoded(batch.column(index)) for batch in batches]))
    return digest.hexdigest()


def _add(digest: _Hash, array: pa.Array) -> None:
    """What lies under a null is undefined, so nulls are taken out at every depth and counted by their places."""
    array = _decoded(array)
    kind = array.type
    if pa.types.is_null(kind):
        digest.update(str(len(array)).encode())
        return
    if array.null_count:
        _add(digest, array.is_valid())
        array = array.drop_null()
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
        array = pa.ListArray.from_arrays(array.offsets, entries)
        kind = array.type
    if pa.types.is_struct(kind):
        for child in array.flatten():
            _add(digest, child)
    elif _is_list(kind):
        _add(digest, pc.list_value_length(array))
        _add(digest, array.flatten())
    elif pa.types.is_nested(kind):
        digest.update(repr(array.to_pylist()).encode("utf-8", "surrogatepass"))
    else:
        plain = array.cast(pa.uint8()) if pa.types.is_boolean(kind) else array
        digest.update(pa.record_batch([plain], names=["values"]).serialize())


def _decoded(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        return _decoded(array.storage)
    if isinstance(array, pa.DictionaryArray):
        return _decoded(array.dictionary_decode())
    if pa.types.is_run_end_encoded(array.type):
        return _decoded(pc.run_end_decode(array))
    if array.type == pa.string_view():
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if array.type == pa.binary_view() else array


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def mended(table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """``table`` with U+FFFD where its texts are no UTF-8, and the rows (index -> column) that had such a text.

    Raises:
        pyarrow.ArrowInvalid: the table is damaged in another way.
    """
    bad_rows: dict[int, str] = {}
    for index, field in enumerate(table.schema):
        column = table.column(index)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            decoded = pa.chunked_array([_decoded(chunk) for chunk in column.chunks])
            values = decoded.cast(_bytes_type(decoded.type)).to_pylist()
            replaced = [_text(value, kind=decoded.type) for value in values]
            for row, (_, is_bad) in enumerate(replaced):
                if is_bad:
                    bad_rows.setdefault(row, field.name)
            table = table.set_column(index, field, pa.array([value for value, _ in replaced], type=field.type))
            table.column(index).validate(full=True)
    return table, bad_rows


def _bytes_type(kind: pa.DataType) -> pa.DataType:
    """``kind`` with bytes for text at every depth."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.binary() if pa.types.is_string(kind) else pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_bytes_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_bytes_type(kind.key_type), _bytes_type(kind.item_type))
    if _is_list(kind):
        item = kind.value_field.with_type(_bytes_type(kind.value_type))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.list_(item) if pa.types.is_list(kind) else pa.large_list(item)
    return kind


def _text(value: Any, *, kind: pa.DataType) -> tuple[Any, bool]:
    """A value of ``_bytes_type(kind)`` in ``kind``, and whether a text in it had to be changed."""
    if value is None:
        return None, False
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = value.decode("utf-8", "replace")
        return text, text.encode() != value
    if pa.types.is_struct(kind):
        fields = {field.name: _text(value[field.name], kind=field.type) for field in kind}
        return {name: item for name, (item, _) in fields.items()}, any(is_bad for _, is_bad in fields.values())
    if pa.types.is_map(kind):
        kind = pa.list_(pa.struct({"0": kind.key_type, "1": kind.item_type}))
        items, is_bad = _text([{"0": key, "1": item} for key, item in value], kind=kind)
        return [(item["0"], item["1"]) for item in items], is_bad
    if _is_list(kind):
        texts = [_text(item, kind=kind.value_type) for item in value]
        return [item for item, _ in texts], any(is_bad for _, is_bad in texts)
    return value, False

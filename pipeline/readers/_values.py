"""What a table's values are, whatever its layout: a digest of them, and texts that are no UTF-8 mended.

Knows Arrow types; knows no rows, files or formats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

_BYTES_OF_TEXT = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
_PLAIN_OF_VIEW = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def digest(batches: Sequence[pa.RecordBatch]) -> str:
    """A sha256 of names, types and values. Row groups, batch borders, compression and dictionaries do not count."""
    digest = hashlib.sha256()
    for index, field in enumerate(batches[0].schema):
        digest.update(f"{field.name}\0{field.type}\0".encode())
        for batch in batches:
            _bare(batch.column(index)).validate(full=True)  # its offsets are from a file, and what follows trusts them
        _add(digest, pa.concat_arrays([_decoded(batch.column(index)) for batch in batches]))
    return digest.hexdigest()


def _add(digest: _Hash, array: pa.Array) -> None:
    """What lies under a null is undefined, so nulls are taken out at every depth and counted by their places."""
    array = _decoded(array)
    kind = array.type
    if pa.types.is_null(kind):
        digest.update(str(len(array)).encode())
        return
    digest.update(b"nulls" if array.null_count else b"whole")  # or a null could pass for a value that holds one
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
        digest.update(repr(_bare(array).to_pylist()).encode())
    else:
        plain = array.cast(pa.uint8()) if pa.types.is_boolean(kind) else array
        digest.update(pa.record_batch([plain], names=["values"]).serialize())


def _decoded(array: pa.Array) -> pa.Array:
    if isinstance(array, pa.ExtensionArray):
        return _decoded(array.storage)
    if (plain := _mapped(array.type, leaf=_without_view)) != array.type:
        return _decoded(array.cast(plain))
    if isinstance(array, pa.DictionaryArray):
        return _decoded(array.dictionary_decode())
    return _decoded(pc.run_end_decode(array)) if pa.types.is_run_end_encoded(array.type) else array


def _is_list(kind: pa.DataType) -> bool:
    is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return bool(is_view or pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def mended(table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """``table`` with U+FFFD where its texts are no UTF-8, and the rows (index -> column) that had such a text.

    Nothing else is touched: moments that no calendar knows stay as they are.

    Raises:
        pyarrow.ArrowInvalid: the table is damaged in another way.
    """
    bad_rows: dict[int, str] = {}
    for index, field in enumerate(table.schema):
        column = table.column(index)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            replaced = [_text(value, kind=field.type) for chunk in column.chunks for value in _bare(chunk).to_pylist()]
            bad = [row for row, (_, is_bad) in enumerate(replaced) if is_bad]
            if bad:
                texts = pa.array([value for value, _ in replaced], type=_mapped(field.type, leaf=_as_stored))
                table = table.set_column(index, field, texts.view(field.type))
                bad_rows |= dict.fromkeys(bad, field.name) | bad_rows
    return table, bad_rows


def _bare(array: pa.Array) -> pa.Array:
    """The same values with bytes for texts and numbers for times."""
    return array.view(_mapped(array.type, leaf=_as_bytes))


def _as_stored(kind: pa.DataType) -> pa.DataType:
    """A ``leaf`` of ``_mapped``: what ``kind`` is stored as, where Python holds all values of that. Times are numbers."""
    if isinstance(kind, pa.BaseExtensionType):
        return _mapped(kind.storage_type, leaf=_as_stored)
    if pa.types.is_temporal(kind) and kind != pa.month_day_nano_interval():
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    return kind


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """A ``leaf`` of ``_mapped``: as ``_as_stored``, and texts are bytes."""
    if isinstance(kind, pa.BaseExtensionType):
        return _mapped(kind.storage_type, leaf=_as_bytes)
    return _BYTES_OF_TEXT.get(kind) or _as_stored(kind)


def _without_view(kind: pa.DataType) -> pa.DataType:
    """A ``leaf`` of ``_mapped``: Arrow cannot take from views."""
    return _PLAIN_OF_VIEW.get(kind, kind)


def _mapped(kind: pa.DataType, *, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """``kind`` with ``leaf`` of every type in it that holds no other."""
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _mapped(kind.value_type, leaf=leaf), ordered=kind.ordered)
    if pa.types.is_map(kind):
        return pa.map_(_mapped(kind.key_type, leaf=leaf), _mapped(kind.item_type, leaf=leaf))
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        inside = [field.with_type(_mapped(field.type, leaf=leaf)) for field in kind]
        return pa.struct(inside) if pa.types.is_struct(kind) else pa.union(inside, mode=kind.mode, type_codes=kind.type_codes)
    return _list_of(_mapped(kind.value_type, leaf=leaf), like=kind) if _is_list(kind) else leaf(kind)


def _list_of(item: pa.DataType, *, like: pa.DataType) -> pa.DataType:
    field = like.value_field.with_type(item)
    if pa.types.is_fixed_size_list(like):
        return pa.list_(field, like.list_size)
    if pa.types.is_list(like):
        return pa.list_(field)
    if pa.types.is_large_list(like):
        return pa.large_list(field)
    return pa.list_view(field) if pa.types.is_list_view(like) else pa.large_list_view(field)


def _text(value: Any, *, kind: pa.DataType) -> tuple[Any, bool]:
    """A value in ``_as_bytes`` with text for bytes, and whether a text in it had to be changed."""
    if value is None:
        return None, False
    if isinstance(kind, pa.BaseExtensionType):
        return _text(value, kind=kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _text(value, kind=kind.value_type)
    if kind in _BYTES_OF_TEXT:
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

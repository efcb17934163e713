"""The digest of a table's values: equal if and only if the values are, however they are laid out."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
from hypothesis import given, settings, strategies as st

from pipeline.readers import _values

WORD = st.none() | st.sampled_from(["", "a", "ab", "b"])
NUMBER = st.none() | st.integers(0, 2)
# Type -> values from so small a choice that equal rows, and rows that differ in a border or a null only, come up often.
KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), WORD),
    (pa.large_string(), WORD),
    (pa.string_view(), WORD),
    (pa.dictionary(pa.int8(), pa.string()), WORD),
    (pa.int64(), NUMBER),
    (pa.bool_(), st.none() | st.booleans()),
    (pa.null(), st.none()),
    (pa.list_(pa.string()), st.none() | st.lists(WORD, max_size=2)),
    (pa.large_list(pa.list_(pa.int8())), st.none() | st.lists(st.none() | st.lists(NUMBER, max_size=2), max_size=2)),
    (pa.list_(pa.bool_(), 2), st.none() | st.lists(st.none() | st.booleans(), min_size=2, max_size=2)),
    (pa.list_view(pa.int8()), st.none() | st.lists(NUMBER, max_size=2)),
    (pa.list_(pa.struct({"x": pa.string_view()})), st.none() | st.lists(st.none() | st.fixed_dictionaries({"x": WORD}), max_size=2)),
    (pa.struct({"x": pa.string(), "y": pa.int8()}), st.none() | st.fixed_dictionaries({"x": WORD, "y": NUMBER})),
    (pa.map_(pa.string(), pa.int8()), st.none() | st.lists(st.tuples(st.sampled_from(["", "a"]), NUMBER), max_size=2)),
]


def batches(values: list[Any], kind: pa.DataType, cuts: list[int]) -> list[pa.RecordBatch]:
    """The values as one column, in slices of a longer array, so that offsets are not zero and batches have other borders."""
    array = pa.array([*values[:1], *values, *values[:1]], kind)
    borders = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    return [
        pa.record_batch([array.slice(1 + start, stop - start)], names=["column"])
        for start, stop in itertools.pairwise(borders)
        if start < stop or len(values) == 0
    ]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), kind=st.sampled_from(range(len(KINDS))), cuts=st.tuples(*[st.lists(st.integers(0, 9), max_size=3)] * 2))
def test_digests_are_equal_if_and_only_if_the_values_are(data: st.DataObject, kind: int, cuts: tuple[list[int], list[int]]) -> None:
    type_, strategy = KINDS[kind]
    rows = st.lists(strategy, min_size=1, max_size=3)
    one, other = data.draw(rows), data.draw(rows)
    digests = [_values.digest(batches(values, type_, cut)) for values, cut in ((one, cuts[0]), (other, cuts[1]), (one, cuts[1]))]
    assert (digests[0] == digests[1]) == (one == other)
    assert digests[0] == digests[2], "layout does not count"


def test_a_null_is_not_a_value_that_holds_one() -> None:
    kind = pa.list_(pa.struct({"x": pa.string()}))
    assert len({_values.digest(batches([value], kind, [])) for value in (None, [], [None], [{"x": None}], [{"x": ""}])}) == 5


def test_names_and_types_count() -> None:
    tables = [{"a": pa.array([1], pa.int8())}, {"a": pa.array([1], pa.int16())}, {"b": pa.array([1], pa.int8())}]
    assert len({_values.digest(pa.table(table).to_batches()) for table in tables}) == 3


def test_what_lies_under_a_null_does_not_count() -> None:
    validity = pa.py_buffer(b"\x01")
    arrays = [pa.Array.from_buffers(pa.int8(), 2, [validity, pa.py_buffer(bytes([7, hidden]))]) for hidden in (0, 9)]
    digests = {_values.digest([pa.record_batch([array], names=["column"])]) for array in arrays}
    assert len(digests) == 1


UNTOLD = 2**62  # as a moment or a span of time, more than Python's own types can say


def untold(kind: pa.DataType) -> pa.Array:
    return pa.array([UNTOLD, None, 5], pa.int64()).view(kind)


UNTELLABLE = pa.table(
    {
        "date": untold(pa.date64()),
        "second": untold(pa.timestamp("s", "No/Where")),
        "nanosecond": untold(pa.timestamp("ns")),
        "time": untold(pa.time64("us")),
        "duration": untold(pa.duration("s")),
        "view": pa.ListViewArray.from_arrays([0, 1, 2], [1, 1, 1], untold(pa.timestamp("s"))),
        "union": pa.UnionArray.from_sparse(pa.array([0, 0, 0], pa.int8()), [untold(pa.date64()), untold(pa.timestamp("s"))]),
    }
)


def test_moments_that_python_cannot_hold_have_a_digest_and_stay() -> None:
    for name in UNTELLABLE.column_names:
        column = UNTELLABLE.select([name])
        assert _values.digest(column.to_batches()) != _values.digest(column.slice(1).to_batches()), name
        table, bad_rows = _values.mended(column)
        assert str(table) == str(column), name
        assert bad_rows == {}


def test_moments_beside_a_text_that_is_mended_stay() -> None:
    words = pa.array([b"fine", b"\xff", None], pa.binary()).view(pa.string())
    given = pa.StructArray.from_arrays([words, *(column.chunk(0) for column in UNTELLABLE.select(range(5)).columns)], ["words", *"abcde"])
    table, bad_rows = _values.mended(pa.table({"row": given}))
    assert bad_rows == {1: "row"}
    whole = table["row"].combine_chunks()
    assert whole.field("words").to_pylist() == ["fine", "\ufffd", None]
    for letter in "abcde":
        assert str(whole.field(letter)) == str(given.field(letter))


def test_mended_texts_are_all_utf8_at_every_depth() -> None:
    offsets = pa.array([0, 1, 2], pa.int32())
    damaged = pa.Array.from_buffers(pa.string(), 2, [None, offsets.buffers()[1], pa.py_buffer(b"a\xff")])
    good = pa.array([1, 2])
    columns = {
        "plain": damaged,
        "large": damaged.cast(pa.binary()).cast(pa.large_binary()).view(pa.large_string()),
        "list": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), damaged),
        "fixed": pa.FixedSizeListArray.from_arrays(damaged, 1),
        "view": damaged.cast(pa.binary()).cast(pa.binary_view()).view(pa.string_view()),
        "list_view": pa.ListViewArray.from_arrays([0, 1], [1, 1], damaged),
        "words": pa.StructArray.from_arrays([pa.DictionaryArray.from_arrays([0, 1], damaged)], ["x"]),
        "json": pa.ListArray.from_arrays([0, 1, 2], pa.ExtensionArray.from_storage(pa.json_(pa.string()), damaged)),
        "struct": pa.StructArray.from_arrays([damaged, good], ["x", "y"]),
        "map": pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(["k", "l"]), damaged),
        "fine": good,
    }
    table, bad_rows = _values.mended(pa.table(columns))
    table.validate(full=True)
    assert bad_rows == {1: "plain"}
    assert table.schema == pa.table(columns).schema
    assert table.to_pylist()[1] == {
        "plain": "\ufffd",
        "large": "\ufffd",
        "list": ["\ufffd"],
        "fixed": ["\ufffd"],
        "view": "\ufffd",
        "list_view": ["\ufffd"],
        "words": {"x": "\ufffd"},
        "json": ["\ufffd"],
        "struct": {"x": "\ufffd", "y": 2},
        "map": [("l", "\ufffd")],
        "fine": 2,
    }

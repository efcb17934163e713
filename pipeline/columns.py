"""The output's columns: the input's as they are, those of every job, and the job's own.

Knows how one finished or failed row becomes values, and how a shard's rows become one table; writes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from engine import Completion
from pipeline.types import RowError

_SHARED = pa.schema(
    {
        "row_id": pa.string(),
        "sample_index": pa.int16(),
        "generation": pa.string(),
        "reasoning": pa.string(),
        "row_key": pa.string(),
        "finish_reason": pa.string(),
        "stop_reason": pa.string(),
        "status": pa.string(),
        "error_code": pa.string(),
        "error_message": pa.string(),
        "num_prompt_tokens": pa.int32(),
        "num_cached_tokens": pa.int32(),
        "num_generated_tokens": pa.int32(),
        "cumulative_logprob": pa.float32(),
    }
)
_TOKEN_IDS = pa.schema({"prompt_token_ids": pa.list_(pa.int32()), "token_ids": pa.list_(pa.int32())})
# What a row did not ask for is null in it. A prompt's first token has no probability, so its entry is null.
_LOGPROBS = pa.schema(
    {
        "logprobs": pa.list_(pa.float32()),
        "top_logprob_ids": pa.list_(pa.list_(pa.int32())),
        "top_logprobs": pa.list_(pa.list_(pa.float32())),
        "prompt_logprobs": pa.list_(pa.float32()),
    }
)

NAMES = (*_SHARED.names, *_TOKEN_IDS.names, *_LOGPROBS.names)

# Text that is copied in one piece stays well below the 2 GiB that a string column's offsets can count.
_MAX_TAKE_BYTES = 256 * 2**20


class OutputColumns:
    """The schema of every part, and the tables in it.

    Attributes:
        schema: the input's columns, then the added ones with ``prefix`` before their names.
        added: the added columns without the prefix.
        token_ids: the columns ``prompt_token_ids`` and ``token_ids`` are there.
    """

    def __init__(self, carried: pa.Schema, *, fields: Sequence[pa.Field], prefix: str, token_ids: bool, logprobs: bool) -> None:
        """Raises ValueError where an added column would have the name of an input column, or two input columns share one."""
        twice = sorted(name for name, count in Counter(carried.names).items() if count > 1)
        if twice:
            raise ValueError(f"input.path: the input has two columns of the name {twice[0]!r}; give every column a name of its own")
        self.token_ids = token_ids
        self.added = pa.schema([*_SHARED, *(_TOKEN_IDS if token_ids else ()), *(_LOGPROBS if logprobs else ()), *fields])
        self._prefix = prefix
        clashes = [field.name for field in self.added if carried.get_field_index(prefix + field.name) >= 0]
        if clashes:
            listed = ", ".join(repr(prefix + name) for name in clashes)
            raise ValueError(
                f"output.prefix: the input has columns of the same names as the output's: {listed}; "
                f"set output.prefix, for example output.prefix={'pagemill_' if prefix == '' else prefix + '_'}"
            )
        self.schema = pa.schema([*carried, *(field.with_name(prefix + field.name) for field in self.added)])

    def table(self, carried: pa.Table, rows: Sequence[Sequence[Mapping[str, Any]]]) -> pa.Table:
        """The part's table: ``rows[i]`` are the output rows of input row ``i``, one a sample; absent values are null."""
        if any(len(samples) != 1 for samples in rows):
            carried = pa.concat_tables(repeated(carried, [len(samples) for samples in rows]))
        flat = [{**row, "sample_index": sample} for samples in rows for sample, row in enumerate(samples)]
        added = [pa.array([row.get(field.name) for row in flat], type=field.type) for field in self.added]
        return pa.table([*carried.columns, *added], schema=self.schema)


def answered(completion: Completion, answer: Mapping[str, Any], *, prompt_token_ids: Sequence[int] | None) -> dict[str, Any]:
    """The values of a row that has its answer."""
    return {
        "status": "ok",
        "finish_reason": completion.finish_reason,
        "stop_reason": None if completion.stop_reason is None else str(completion.stop_reason),
        **_numbers(completion),
        "cumulative_logprob": completion.cumulative_logprob,
        "prompt_token_ids": prompt_token_ids,
        "token_ids": completion.token_ids,
        **_logprobs(completion),
        **answer,
    }


def failed(error: RowError, *, completion: Completion | None = None) -> dict[str, Any]:
    """The values of an error row; its counts are null where it never got to the engine."""
    return {
        "status": "error",
        "finish_reason": "error",
        "error_code": error.code,
        "error_message": error.message,
        **(_numbers(completion) if completion is not None else {}),
    }


def row_label(columns: Mapping[str, Any], *, id_column: str | None, row_key: str) -> str:
    """``row_id``: the row's id as text (``id_column``, else ``id``, else ``custom_id``), else its key."""
    for name in (id_column,) if id_column is not None else ("id", "custom_id"):
        value = columns.get(name)
        if value is not None:
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return row_key


def num_bytes(table: pa.Table) -> int:
    """The rows' own bytes: a dictionary is shared by all rows of a part, so only its indices count."""
    return sum(
        column.length() * column.type.index_type.bit_width // 8 if pa.types.is_dictionary(column.type) else column.nbytes
        for column in table.columns
    )


def taken(table: pa.Table, indices: Sequence[int]) -> pa.Table:
    """The rows ``indices`` of ``table``, in this order."""
    return pa.table([_taken(column, indices) for column in table.columns], schema=table.schema)


def repeated(table: pa.Table, counts: Sequence[int], *, max_bytes: int = _MAX_TAKE_BYTES) -> Iterator[pa.Table]:
    """``table`` with row ``i`` ``counts[i]`` times, in pieces with ``max_bytes`` of values at most, or one row."""
    most = max(counts)
    if num_bytes(table) * most <= max_bytes:
        indices = [index for index, count in enumerate(counts) for _ in range(count)]
        yield taken(table, indices)
    elif len(counts) > 1:
        middle = len(counts) // 2
        yield from repeated(table.slice(0, middle), counts[:middle], max_bytes=max_bytes)
        yield from repeated(table.slice(middle), counts[middle:], max_bytes=max_bytes)
    else:
        yield from [table] * most


def _taken(column: pa.ChunkedArray, indices: Sequence[int]) -> pa.ChunkedArray:
    try:
        return column.take(pa.array(indices))
    except pa.ArrowNotImplementedError:  # Arrow can cut views and run-end encoded columns, but not take from them
        return pa.chunked_array([chunk for index in indices for chunk in column.slice(index, 1).chunks], type=column.type)


def _logprobs(completion: Completion) -> dict[str, Any]:
    top, prompt = completion.top_logprobs, completion.prompt_logprobs
    return {
        "logprobs": completion.logprobs,
        "top_logprob_ids": [[token_id for token_id, _ in pairs] for pairs in top] or None,
        "top_logprobs": [[logprob for _, logprob in pairs] for pairs in top] or None,
        "prompt_logprobs": None if prompt is None else [None, *prompt],
    }


def _numbers(completion: Completion) -> dict[str, int]:
    return {
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "num_generated_tokens": len(completion.token_ids),
    }

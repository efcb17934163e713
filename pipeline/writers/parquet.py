"""Parquet with statistics and a page index; one row group for each record batch, so a row group is bounded by bytes too.

What Parquet cannot give back in the type it came in is refused beforehand: Parquet itself is asked, not a list of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.writer import OutputOptions

SUFFIXES = {"zstd": ".parquet", "lz4": ".parquet", "gzip": ".parquet", "none": ".parquet"}
USES = ()
COMPANION = None


def check(schema: pa.Schema, *, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``: every column is written to memory, with one null, and read back."""
    for field in schema:
        problem = _problem(field)
        if problem is not None:
            raise ValueError(
                f"output.format: Parquet {problem}, the type of the column {field.name!r}; "
                "take output=arrow, or leave the column out with input.columns"
            )


def write(path: Path, batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, compression: str, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``."""
    with pq.ParquetWriter(path, schema, compression=compression, write_page_index=True) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _problem(field: pa.Field) -> str | None:
    """What keeps ``field``'s type out of Parquet, or None."""
    if pa.types.is_nested(field.type) and re.search("(string|binary)_view", str(field.type)):
        return f"cannot hold {field.type}"  # whether it can depends on where a batch is cut
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.table([pa.nulls(1, field.type)], names=[field.name]), sink)
        came_back = pq.read_table(pa.BufferReader(sink.getvalue())).schema.field(0).type
    except (pa.ArrowException, OSError):
        return f"cannot hold {field.type}"
    return None if came_back == field.type else f"gives {came_back} back for {field.type}"

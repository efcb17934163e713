"""Parquet with statistics and a page index; one row group for each record batch, so a row group is bounded by bytes too.

What Parquet cannot give back in the type it came in is refused beforehand: Parquet itself is asked, not a list of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.writer import OutputOptions

SUFFIXES = {"zstd": ".parquet", "lz4": ".parquet", "gzip": ".parquet", "none": ".parquet"}
USES = ()
COMPANION = None


def check(schema: pa.Schema, *, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``: every column is written to memory, without rows, and read back."""
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
    schema = pa.schema([field])
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(schema.empty_table(), sink)
    except pa.ArrowException:
        return f"cannot hold {field.type}"
    came_back = pq.read_schema(pa.BufferReader(sink.getvalue())).field(0).type
    return None if came_back == field.type else f"gives {came_back} back for {field.type}"

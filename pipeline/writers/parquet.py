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
    """See ``pipeline.writer.Format``: a null of every type is written to memory and read back."""
    for kind in dict.fromkeys(schema.types):
        problem = _problem(kind)
        if problem is not None:
            name = next(field.name for field in schema if field.type == kind)
            raise ValueError(
                f"output.format: Parquet {problem}, the type of the column {name!r}; "
                "take output=arrow, or leave the column out with input.columns"
            )


def write(path: Path, batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, compression: str, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``."""
    with pq.ParquetWriter(path, schema, compression=compression, write_page_index=True) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _problem(kind: pa.DataType) -> str | None:
    """What keeps ``kind`` out of Parquet, or None."""
    if pa.types.is_nested(kind) and re.search("(string|binary)_view", str(kind)):
        return f"cannot hold {kind}"  # whether it can depends on where a batch is cut
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(pa.table([pa.nulls(1, kind)], names=["column"]), sink)
        came_back = pq.read_table(pa.BufferReader(sink.getvalue())).schema.field(0).type
    except (pa.ArrowException, OSError):
        return f"cannot hold {kind}"
    return None if came_back == kind else f"gives {came_back} back for {kind}"

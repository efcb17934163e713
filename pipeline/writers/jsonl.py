"""JSON lines: an object for each row, with every column in the schema's order; the values' rules are in ``_json_values``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from pipeline.writer import OutputOptions
from pipeline.writers._json_values import encoder, json_lines

SUFFIXES = {"none": ".jsonl", "zstd": ".jsonl.zst", "gzip": ".jsonl.gz"}
USES = ()
COMPANION = None


def check(schema: pa.Schema, *, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``."""
    for field in schema:
        try:
            encoder(field.type)
        except TypeError as error:
            raise ValueError(
                f"output.format: the column {field.name!r} cannot be written as JSON lines: {error}; "
                "take output=arrow, or leave the column out with input.columns"
            ) from error


def write(path: Path, batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, compression: str, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``."""
    encode_row = encoder(pa.struct(list(schema)))
    with pa.output_stream(str(path), compression=None if compression == "none" else compression) as sink:
        for batch in batches:
            for line in json_lines(encode_row(batch.to_struct_array())):
                sink.write(line.encode("utf-8"))

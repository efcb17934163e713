"""Arrow IPC, as a file with a footer (random access, memory mapping) or as a stream; it holds every Arrow type."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from pipeline.writer import OutputOptions

SUFFIXES = {"zstd": ".arrow", "lz4": ".arrow", "none": ".arrow"}
USES = ("ipc",)
COMPANION = None


def check(schema: pa.Schema, *, options: OutputOptions) -> None:
    """Nothing to refuse."""


def write(path: Path, batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, compression: str, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``."""
    settings = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
    opened = pa.ipc.new_file if options.ipc == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, opened(sink, schema, options=settings) as writer:
        for batch in batches:
            writer.write_batch(batch)

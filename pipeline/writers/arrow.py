"""Arrow IPC, as a file with a footer (random access, memory mapping) or as a stream."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from pipeline.writer import OutputOptions

SUFFIX = ".arrow"


def write(path: Path, batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, options: OutputOptions) -> None:
    """See ``pipeline.writer.Format``."""
    settings = pa.ipc.IpcWriteOptions(compression=None if options.compression == "none" else options.compression)
    opened = pa.ipc.new_file if options.ipc == "file" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, opened(sink, schema, options=settings) as writer:
        for batch in batches:
            writer.write_batch(batch)

"""The working part of one open shard: the answers so far, in a file that a crash can only cut at its end.

Knows how answers are kept until their part is whole; when that is, and what becomes of a part, is not its business.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from pipeline import durable
from pipeline.types import Shard

FLUSH_SECONDS = 2.0
_FLUSH_BYTES = 2**20
_ROW_BYTES = 64  # of a row without its texts and lists

Answers = Sequence[Mapping[str, Any]]  # one input row's output rows, in sample order


class Journal:
    """Rows of one shard that are done, as an Arrow IPC stream: ``row_in_shard`` and the columns of ``schema``.

    A batch holds whole rows, all samples of each, and its own checksum, so what a cut or damaged file still gives is
    right. The file appears with the first flush: a shard that is done sooner never has one. A failed write ends the
    journal, since nothing may come after a torn batch.
    """

    def __init__(self, path: Path, *, shard: Shard, schema: pa.Schema) -> None:
        self._path = path
        self._schema = pa.schema([pa.field("row_in_shard", pa.int32()), *schema], metadata={"shard": json.dumps(asdict(shard))})
        self._pending: dict[int, Answers] = {}
        self._num_pending_bytes = 0
        self._stream: BinaryIO | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None

    def take_over(self) -> dict[int, Answers]:
        """What an earlier run left at the path for this shard, by row; it goes on in a new file, since a cut stream cannot.

        Raises:
            OSError: the folder cannot be written.
        """
        batches = list(_whole_batches(self._path, schema=self._schema))
        if batches:
            new = self._path.with_name(self._path.name + ".new")
            self._begin(new)
            for batch in batches:
                self._write(batch)
            self._sync()
            durable.rename(new, self._path)
        return _rows(batches)

    def add(self, row: int, answers: Answers) -> None:
        """Row ``row`` is done; it is on the disk after the next ``flush``, which comes by itself when enough is waiting."""
        self._pending[row] = answers
        self._num_pending_bytes += sum(map(_num_bytes, answers))
        if self._num_pending_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Have every row on the disk that was added."""
        if not self._pending:
            return
        rows, self._pending, self._num_pending_bytes = self._pending, {}, 0
        if is_new := self._stream is None:
            self._begin(self._path)
        flat = [
            {**values, "row_in_shard": row, "sample_index": sample}
            for row, answers in rows.items()
            for sample, values in enumerate(answers)
        ]
        columns = [pa.array([values.get(field.name) for values in flat], type=field.type) for field in self._schema]
        self._write(pa.record_batch(columns, schema=self._schema))
        self._sync()
        if is_new:
            durable.sync_folder(self._path.parent)

    def close(self) -> None:
        """Let go of the file; what was not flushed is forgotten."""
        self._pending = {}
        if self._stream is not None:
            with suppress(OSError):  # it tries again to write what failed before, which has been told
                self._stream.close()

    def _begin(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._writer = pa.ipc.new_stream(self._stream, self._schema)

    def _write(self, batch: pa.RecordBatch) -> None:
        assert self._writer is not None
        self._writer.write_batch(batch, custom_metadata={"crc32": _checksum(batch)})

    def _sync(self) -> None:
        assert self._stream is not None
        self._stream.flush()
        os.fsync(self._stream.fileno())


def _whole_batches(path: Path, *, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches at ``path`` up to the first that is cut or damaged; none where the file is another shard's."""
    if not path.exists():
        return
    try:
        with pa.ipc.open_stream(path.read_bytes()) as reader:  # from memory, where a damaged length cannot ask for more than there is
            if not reader.schema.equals(schema, check_metadata=True):
                return
            while True:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
                batch.validate(full=True)
                if metadata is None or metadata.get(b"crc32") != _checksum(batch).encode():
                    return
                yield batch
    except (StopIteration, OSError, MemoryError, pa.ArrowException):
        return


def _rows(batches: Sequence[pa.RecordBatch]) -> dict[int, Answers]:
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for batch in batches:
        for values in batch.to_pylist():
            rows.setdefault(values.pop("row_in_shard"), []).append(values)
    return dict(rows)


def _checksum(batch: pa.RecordBatch) -> str:
    return f"{zlib.crc32(batch.serialize()):08x}"


def _num_bytes(values: Mapping[str, Any]) -> int:
    num_bytes = _ROW_BYTES
    for value in values.values():
        if isinstance(value, str):
            num_bytes += len(value)
        elif isinstance(value, (list, tuple)):
            num_bytes += 8 * len(value)
    return num_bytes

"""Parquet: row groups are streamed batch by batch; the types of all columns are kept.

Folders ``key=value/`` are columns too (see ``_key_folders``), files whose schemas differ become one table (see
``_table_schema``), and a change of a file's values is noticed however it was written (see ``_values``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.input_files import InputFile
from pipeline.reader import Reader, Scan
from pipeline.readers import _table_rows

SUFFIXES = (".parquet", ".pq")

_BATCH_ROWS = 256
_BUFFER_BYTES = 1 << 20


def scan(asked: Scan) -> Reader:
    """See ``pipeline.reader.Format``."""
    return _table_rows.scan(asked, sources=asked.files(SUFFIXES), open_table=_open)


@contextmanager
def _open(file: InputFile) -> Iterator[_ParquetTable]:
    try:
        with file.open() as source, pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES) as parquet:
            yield _ParquetTable(parquet)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: cannot be read as Parquet: {error}") from error


class _ParquetTable:
    """See ``_table_rows.OpenTable``."""

    def __init__(self, parquet: pq.ParquetFile) -> None:
        self.schema = parquet.schema_arrow
        self._parquet = parquet

    def batches(self, *, first_row: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Decodes from the row group that holds ``first_row``; raises ArrowInvalid where rows of the footer are not there."""
        metadata = self._parquet.metadata
        ends = list(itertools.accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        group = next((index for index, end in enumerate(ends) if first_row < end), len(ends))
        row = ends[group - 1] if group else 0
        groups = range(group, len(ends))
        for batch in self._parquet.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
            skip = max(0, first_row - row)
            row += batch.num_rows
            if skip < batch.num_rows:
                yield batch.slice(skip)
        if row != metadata.num_rows:
            raise pa.ArrowInvalid(f"the footer tells of {metadata.num_rows:,} rows, but {row:,} are there")

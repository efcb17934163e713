"""Arrow IPC, files and streams, also the cache files of Hugging Face datasets; the types of all columns are kept.

Folders ``key=value/`` are columns too (see ``_key_folders``), files whose schemas differ become one table (see
``_table_schema``), and a change of a file's values is noticed however it was written (see ``_values``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from pipeline.input_files import InputFile
from pipeline.reader import Reader, Scan
from pipeline.readers import _table_rows

SUFFIXES = (".arrow", ".arrows", ".ipc", ".feather")

_FILE_MAGIC = b"ARROW1"


def scan(asked: Scan) -> Reader:
    """See ``pipeline.reader.Format``."""
    return _table_rows.scan(asked, sources=asked.files(SUFFIXES), open_table=_open)


@contextmanager
def _open(file: InputFile) -> Iterator[_ArrowTable]:
    try:
        with pa.memory_map(file.path) if file.is_local else pa.PythonFile(file.open(), mode="r") as source:
            yield _ArrowTable(source)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: cannot be read as Arrow IPC: {error}") from error


class _ArrowTable:
    """See ``_table_rows.OpenTable``; file or stream is told by content."""

    def __init__(self, source: pa.NativeFile) -> None:
        self._source = source
        self._is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        with self._reader() as reader:
            self.schema = reader.schema

    def batches(self, *, first_row: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        row = 0
        with self._reader(columns) as reader:
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches)) if self._is_file else reader
            for batch in batches:
                batch.validate()  # a damaged one may point outside its file, which would end the process
                skip = max(0, first_row - row)
                row += batch.num_rows
                if skip < batch.num_rows:
                    yield batch.slice(skip).select(columns)

    def _reader(self, columns: Sequence[str] = ()) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
        """From the beginning; other columns than ``columns`` are not decoded."""
        self._source.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=[self.schema.get_field_index(name) for name in columns])
        return (pa.ipc.open_file if self._is_file else pa.ipc.open_stream)(self._source, options=options)

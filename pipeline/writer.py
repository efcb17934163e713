"""What a writer is, and how a table is cut into record batches on its way into a part.

Knows no file format: a format is one module in ``pipeline/writers``, found by its file name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import pyarrow as pa

from engine import plugins
from pipeline import durable


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where answers go.

    ``format`` is a module of ``pipeline/writers``. ``ipc`` is file or stream, ``compression`` zstd, lz4 or none.
    ``prefix`` goes before every added column's name. ``token_ids`` adds the columns prompt_token_ids and token_ids,
    ``logprobs`` the columns logprobs, top_logprob_ids, top_logprobs and prompt_logprobs, which hold what a row's sampling
    asks for. A record batch has ``batch_bytes`` at most, or one row.
    """

    format: str = "arrow"
    path: str
    ipc: str = "file"
    compression: str = "zstd"
    prefix: str = ""
    token_ids: bool = False
    logprobs: bool = False
    batch_bytes: int = 8 * 2**20

    def __post_init__(self) -> None:
        for key, known in (("ipc", ("file", "stream")), ("compression", ("zstd", "lz4", "none"))):
            if getattr(self, key) not in known:
                raise ValueError(f"output.{key}: {getattr(self, key)!r} is not one of {', '.join(known)}")
        if self.batch_bytes < 1:
            raise ValueError(f"output.batch_bytes: {self.batch_bytes} must be 1 or more")


class Format(Protocol):
    """A module in ``pipeline/writers``. ``SUFFIX`` ends its files' names."""

    SUFFIX: str

    def write(self, path: Path, batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, options: OutputOptions) -> None:
        """Write a whole file with ``batches`` in ``schema``."""
        ...


class PartWriter:
    """Writes a part's table as a finished file under a name of the caller's choice."""

    def __init__(self, options: OutputOptions) -> None:
        """Raises ValueError where there is no such format."""
        self._options = options
        self._module = cast(Format, plugins.load("pipeline.writers", options.format, key="output"))
        self.suffix = self._module.SUFFIX

    def write(self, path: Path, table: pa.Table) -> None:
        """Write ``table`` to ``path`` and have it on the disk."""
        batches = batches_by_bytes(table, max_bytes=self._options.batch_bytes)
        self._module.write(path, batches, schema=table.schema, options=self._options)
        durable.sync_file(path)


def batches_by_bytes(table: pa.Table, *, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Record batches of ``max_bytes`` at most, so that no string offset can overflow; a larger row is a batch alone."""
    if table.num_rows > 1 and _num_bytes(table) > max_bytes:
        middle = table.num_rows // 2
        yield from batches_by_bytes(table.slice(0, middle), max_bytes=max_bytes)
        yield from batches_by_bytes(table.slice(middle), max_bytes=max_bytes)
    else:
        yield from table.combine_chunks().to_batches()


def _num_bytes(table: pa.Table) -> int:
    """The rows' own bytes: a dictionary is shared by all batches of a part, so only its indices count."""
    return sum(
        column.length() * column.type.index_type.bit_width // 8 if pa.types.is_dictionary(column.type) else column.nbytes
        for column in table.columns
    )

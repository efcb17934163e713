"""What a writer is, and how a table is cut into record batches on its way into a part.

Knows no file format: a format is one module in ``pipeline/writers``, found by its file name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import pyarrow as pa

from engine import plugins
from pipeline import durable
from pipeline.columns import num_bytes

_LOG = logging.getLogger(__name__)

# Keys that some formats use and others do not, with the value that asks for nothing.
_PARTICULAR = {"ipc": "file", "model": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where answers go.

    ``format`` is a module of ``pipeline/writers``. ``path`` is a folder, here or behind a URL; ``scratch`` is the folder here
    in which files for a URL are made (None: in the user's cache). ``ipc`` is file or stream, for Arrow. ``compression`` is
    zstd, lz4, gzip or none, as far as the format has it; "auto" is the format's own. ``prefix`` goes before every added
    column's name. ``token_ids`` adds the columns prompt_token_ids and token_ids, ``logprobs`` the columns logprobs,
    top_logprob_ids, top_logprobs and prompt_logprobs, which hold what a row's sampling asks for. A record batch has
    ``batch_bytes`` at most, or one row. ``model`` is what the file calls the model, for openai_batch.
    """

    format: str = "arrow"
    path: str
    scratch: str | None = None
    ipc: str = "file"
    compression: str = "auto"
    prefix: str = ""
    token_ids: bool = False
    logprobs: bool = False
    batch_bytes: int = 8 * 2**20
    model: str | None = None

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("output.path: is empty; name a folder for the answers")
        for key, known in (("ipc", ("file", "stream")), ("compression", ("zstd", "lz4", "gzip", "none", "auto"))):
            if getattr(self, key) not in known:
                raise ValueError(f"output.{key}: {getattr(self, key)!r} is not one of {', '.join(known)}")
        if self.batch_bytes < 1:
            raise ValueError(f"output.batch_bytes: {self.batch_bytes} must be 1 or more")


class Format(Protocol):
    """A module in ``pipeline/writers``.

    Attributes:
        SUFFIXES: the compressions that it has, its own choice first, each with the ending of the files' names.
        USES: those of the keys ``ipc`` and ``model`` that mean something to it.
        COMPANION: the first word of a second file's name that ``write`` may put beside a part (see ``companion_of``), or None.
    """

    SUFFIXES: Mapping[str, str]
    USES: tuple[str, ...]
    COMPANION: str | None

    def check(self, schema: pa.Schema, *, options: OutputOptions) -> None:
        """Look at the columns before any model is loaded.

        Raises:
            ValueError: a column has a type that the format cannot hold; the message names the column.
        """
        ...

    def write(self, path: Path, batches: Iterable[pa.RecordBatch], *, schema: pa.Schema, compression: str, options: OutputOptions) -> None:
        """Write a whole file with ``batches`` in ``schema``: the same bytes for the same rows, at any time and anywhere.

        ``compression`` is one of ``SUFFIXES``. A companion is written whole under its final name, or taken away where this
        part needs none: it means nothing without its part, which gets its own name later.
        """
        ...


class PartWriter:
    """Writes a part's table as a finished file under a name of the caller's choice.

    Attributes:
        suffix: the ending of a part's name.
        companions: a glob for the files that may lie beside the parts, or None.
    """

    def __init__(self, options: OutputOptions, *, schema: pa.Schema) -> None:
        """For tables in ``schema``. Raises ValueError where there is no such format, or it cannot write them; warns of unused keys."""
        self._options = options
        self._module = cast(Format, plugins.load("pipeline.writers", options.format, key="output"))
        suffixes = self._module.SUFFIXES
        self._compression = next(iter(suffixes)) if options.compression == "auto" else options.compression
        if self._compression not in suffixes:
            raise ValueError(f"output.compression: {options.format} has {', '.join(suffixes)}, but not {options.compression}")
        self.suffix = suffixes[self._compression]
        self.companions = None if self._module.COMPANION is None else f"{self._module.COMPANION}-[0-9]*{self.suffix}"
        for key, unset in _PARTICULAR.items():
            if key not in self._module.USES and getattr(options, key) != unset:
                _LOG.warning("output.%s=%s is not used: output=%s has no such choice", key, getattr(options, key), options.format)
        self._module.check(schema, options=options)

    def write(self, path: Path, table: pa.Table) -> None:
        """Write ``table`` to ``path`` and have it on the disk."""
        batches = batches_by_bytes(table, max_bytes=self._options.batch_bytes)
        self._module.write(path, batches, schema=table.schema, compression=self._compression, options=self._options)
        durable.sync_file(path)


def companion_of(path: Path, word: str) -> Path:
    """The final name of a second file for the part that is being written to ``path``: ``errors-00017.jsonl`` for ``part-00017.jsonl``."""
    return path.with_name(word + path.name.removeprefix("part").removesuffix(".tmp"))


def batches_by_bytes(table: pa.Table, *, max_bytes: int) -> Iterator[pa.RecordBatch]:
    """Record batches of ``max_bytes`` at most, so that no string offset can overflow; a larger row is a batch alone."""
    if table.num_rows > 1 and num_bytes(table) > max_bytes:
        middle = table.num_rows // 2
        yield from batches_by_bytes(table.slice(0, middle), max_bytes=max_bytes)
        yield from batches_by_bytes(table.slice(middle), max_bytes=max_bytes)
    else:
        yield from table.combine_chunks().to_batches()

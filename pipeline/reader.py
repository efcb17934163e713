"""What a reader is, and which files an input path names.

Knows no file format: a format is one module in ``pipeline/readers``, found by its file name.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import pyarrow as pa

from engine import plugins
from pipeline.types import Shard, ShardRows

# A shard ends before it holds more than this many bytes of input, so that a few open shards always fit in memory.
SHARD_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Where rows come from.

    ``format`` is a module of ``pipeline/readers``; ``path`` a file, a folder or a glob. ``columns`` reads only those
    (default: all). ``id_column`` labels the rows (default: ``id``, else ``custom_id``, else the row key).
    """

    format: str
    path: str
    id_column: str | None = None
    columns: tuple[str, ...] | None = None
    rows_per_shard: int = 1024

    def __post_init__(self) -> None:
        if self.rows_per_shard < 1:
            raise ValueError(f"input.rows_per_shard: {self.rows_per_shard} must be 1 or more")


class InputFile(NamedTuple):
    """A file of the input: ``name`` is relative to ``input.path``'s folder, with slashes, and begins its row keys."""

    path: Path
    name: str


class Reader(Protocol):
    """An input that has been looked through once: its columns and its shards are known, its rows are not held.

    Attributes:
        schema: of every table that ``read`` gives; fixed before the first row is read.
        shards: in input order.
    """

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def shards(self) -> Sequence[Shard]: ...

    def read(self, shards: Iterable[Shard]) -> Iterator[ShardRows]:
        """The rows of ``shards``, which are some of ``self.shards`` in their order; one shard is read at a time.

        Raises:
            ValueError: a file cannot be read any more; the message names it.
        """
        ...


class Format(Protocol):
    """A module in ``pipeline/readers``. ``SUFFIXES`` are the endings of the files that it takes from a folder."""

    SUFFIXES: tuple[str, ...]

    def scan(
        self,
        files: Sequence[InputFile],
        *,
        rows_per_shard: int,
        columns: Sequence[str] | None,
        prompt_columns: Sequence[str],
        limit: int | None,
    ) -> Reader:
        """Look through ``files`` for columns and shards, ``limit`` rows at most.

        Raises:
            ValueError: a file is no such format, or has none of ``prompt_columns`` while others do; the message names it.
        """
        ...


def open_reader(options: InputOptions, *, prompt_columns: Sequence[str], limit: int | None) -> Reader:
    """Find the files and look through them.

    Raises:
        ValueError: nothing there, no rows, or files that cannot be read; the message names the key or the file.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: {limit} must be 1 or more")
    module = cast(Format, plugins.load("pipeline.readers", options.format, key="input"))
    reader = module.scan(
        find_files(options.path, suffixes=module.SUFFIXES),
        rows_per_shard=options.rows_per_shard,
        columns=options.columns,
        prompt_columns=prompt_columns,
        limit=limit,
    )
    if not reader.shards:
        raise ValueError(f"input.path: {options.path!r} has no rows")
    for key, wanted in (("input.columns", options.columns or ()), ("input.id_column", filter(None, [options.id_column]))):
        missing = sorted(set(wanted) - set(reader.schema.names))
        if missing:
            raise ValueError(f"{key}: the input has no column {missing[0]!r}; it has {', '.join(map(repr, reader.schema.names))}")
    return reader


def find_files(path: str, *, suffixes: Sequence[str]) -> list[InputFile]:
    """The files that ``path`` names, sorted by name.

    A file is taken whatever its ending; a folder gives every file below it with one of ``suffixes``, but none whose
    name or folder starts with ``_`` or ``.``; a glob gives the files that match.

    Raises:
        ValueError: there is no such file; the message names ``input.path``.
    """
    place = Path(path)
    if place.is_file():
        return [InputFile(place, place.name)]
    if place.is_dir():
        names = (file.relative_to(place) for file in place.rglob("*") if file.is_file())
        found = [name for name in names if name.name.endswith(tuple(suffixes)) and not any(part[0] in "._" for part in name.parts)]
        if not found:
            raise ValueError(f"input.path: the folder {path!r} has no file that ends in {', '.join(suffixes)}")
        return sorted((InputFile(place / name, name.as_posix()) for name in found), key=lambda file: file.name)
    if not glob.has_magic(path):
        raise ValueError(f"input.path: there is no file or folder {path!r}")
    base = Path(*_without_magic(place.parts))
    matches = {Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file()}  # two ** find a file twice
    if not matches:
        raise ValueError(f"input.path: no file matches {path!r}")
    return sorted((InputFile(match, match.relative_to(base).as_posix()) for match in matches), key=lambda file: file.name)


def _without_magic(parts: Sequence[str]) -> Iterator[str]:
    """The leading folders of a glob that are plain names."""
    for part in parts[:-1]:
        if glob.has_magic(part):
            return
        yield part

"""A Hugging Face data set, streamed: from the hub, a folder with data files, one data file, or what save_to_disk wrote.

``input.path`` is ``hf://OWNER/NAME`` for the hub, else a local path; ``:CONFIG`` and ``:SPLIT`` may follow, as in
``hf://openai/gsm8k:main:test`` or ``folder::train``. Where there is one split only it need not be named. Rows are read
by the library ``datasets``, which also tries again where the network fails; code of a data set is never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.reader import Reader, Scan
from pipeline.readers import _table_rows
from pipeline.readers._table_schema import conformed

_HUB = "hf://"
_BATCH_ROWS = 256


def scan(asked: Scan) -> Reader:
    """See ``pipeline.reader.Format``."""
    split = _Split.from_path(asked.path)
    if (
        asked.output_path is not None
        and not split.is_remote
        and Path(asked.output_path).resolve().is_relative_to(Path(split.place).resolve())
    ):
        raise ValueError(
            f"output.path: {asked.output_path!r} lies in input.path, whose files are all read; choose another folder for the output"
        )
    return _table_rows.scan(asked, sources=[split], open_table=_open)


@dataclass(frozen=True, slots=True)
class _Split:
    """One split of a data set, see ``_table_rows.Source``; ``place`` is a hub id or a local path."""

    place: str
    config: str | None
    split: str | None
    is_remote: bool

    @classmethod
    def from_path(cls, path: str) -> _Split:
        is_remote = path.startswith(_HUB)
        place, *names = path.removeprefix(_HUB).removeprefix("datasets/" if is_remote else "").rsplit(":", 2)
        if not is_remote and Path(path).exists():  # its own colons are no separators
            place, names = path, []
        if not is_remote and not Path(place).exists():
            raise ValueError(f"input.path: there is no file or folder {place!r}; a data set on the hub is hf://OWNER/NAME[:CONFIG[:SPLIT]]")
        config, split = (*(name or None for name in names), None, None)[:2]
        return cls(place, config, split, is_remote)

    @property
    def name(self) -> str:
        place = self.place if self.is_remote else Path(self.place).name
        return ":".join([place, *([self.config or ""] if self.config or self.split else []), *([self.split] if self.split else [])])

    def __str__(self) -> str:
        return f"{_HUB if self.is_remote else ''}{self.place}"

    def load(self) -> Any:
        """The split as the library's Dataset or IterableDataset of Arrow tables."""
        import datasets  # seconds, which other formats need not wait for

        path = Path(self.place)
        if not self.is_remote and any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(self.place)
        elif not self.is_remote and path.is_file():
            loaded = datasets.load_dataset(str(path.parent), self.config, data_files=[path.name], streaming=True)
        else:
            loaded = datasets.load_dataset(self.place, self.config, streaming=True)
        if isinstance(loaded, dict):
            if self.split is None and len(loaded) > 1:
                raise ValueError(f"which split? Name one of {', '.join(loaded)}, for example input.path={self}::{next(iter(loaded))}")
            name = self.split or next(iter(loaded))
            if name not in loaded:
                raise ValueError(f"there is no split {name!r}; choose one of {', '.join(loaded)}")
            loaded = loaded[name]
        return loaded.with_format("arrow")


@contextmanager
def _open(split: _Split) -> Iterator[_Streamed]:
    from datasets.exceptions import DatasetsError

    try:
        rows = _Streamed(split.load())
    except Exception as error:  # the library's own way of failing is any, such as an IndexError where there is no row
        kind = "" if isinstance(error, ValueError) else f"cannot be loaded: {type(error).__name__}: "
        raise ValueError(f"input.path: {split}: {kind}{error}") from error
    try:
        yield rows
    except (OSError, ValueError, pa.ArrowException, DatasetsError) as error:
        raise ValueError(f"input.path: {split}: {error}") from error


class _Streamed:
    """See ``_table_rows.OpenTable``. Where the data set tells no types, they are those of the first batch."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        first = (
            rows.features.arrow_schema.empty_table() if rows.features is not None else next(rows.iter(batch_size=_BATCH_ROWS), pa.table({}))
        )
        self.schema = first.schema

    def batches(self, *, first_row: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([self.schema.field(name) for name in columns])
        for table in self._rows.skip(first_row).iter(batch_size=_BATCH_ROWS):
            for batch in table.combine_chunks().to_batches():
                yield conformed(batch, schema, constants={})

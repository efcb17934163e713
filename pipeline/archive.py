"""An output folder read back: its settings, which part holds which rows, the rows themselves, and which a rerun replaced.

Changes nothing and computes nothing; what is right or wrong about a folder is told by pipeline.verify.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import durable
from pipeline.records import MANIFEST, RERUNS, RUN, SHARDS, FinishedPart
from pipeline.types import Shard

_ROWLESS_FORMATS = ("openai_batch",)  # their lines hold no columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """One line of ``_reruns.jsonl``: with it ``rows`` input rows of a part were replaced, and the part's sha256 became this."""

    rerun: str
    part: int
    rows: int
    sha256: str

    def replaced(self, folder: Path) -> Path:
        """Where the rows lie that were replaced."""
        return folder / self.rerun / "replaced" / f"part-{self.part:05d}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One output folder.

    Attributes:
        config: the run's whole configuration, as ``_run.json`` has it.
        columns: name -> Arrow type, as text, of every part.
        shards: part number -> the rows that belong to it, finished or not.
        parts: part number -> its line of ``_manifest.jsonl``; of several the one that the file agrees with, else the last.
        merges: what reruns replaced, the oldest first.
    """

    folder: Path
    config: Mapping[str, Any]
    columns: Mapping[str, str]
    shards: Mapping[int, Shard]
    parts: Mapping[int, FinishedPart]
    merges: Sequence[Merge]

    @classmethod
    def open(cls, path: str | Path) -> Archive:
        """Read the records in ``path``.

        Raises:
            ValueError: there is no run there, or its record is damaged; the message names the file.
        """
        folder = Path(path)
        record = _run_record(folder / RUN)
        lines = _manifest(folder / MANIFEST)
        shard_lines = durable.read_lines(folder / SHARDS)
        indices = [line.pop("part", None) for line in shard_lines]
        shards = dict(zip(indices, _built(Shard, shard_lines, path=folder / SHARDS), strict=True))
        unknown = sorted(set(lines) - set(shards))
        if unknown:
            raise ValueError(f"{folder / SHARDS}: damaged: it does not know part {unknown[0]}, which {MANIFEST} has")
        return cls(
            folder=folder,
            config=record["config"],
            columns=record["columns"],
            shards={index: shards[index] for index in sorted(shards)},
            parts={index: _current(folder, lines[index]) for index in sorted(lines)},
            merges=_entries(Merge, folder / RERUNS),
        )

    @property
    def has_rows(self) -> bool:
        """Whether the parts' format keeps the columns, so that rows can be read back."""
        return self.config["output"]["format"] not in _ROWLESS_FORMATS

    def name_of(self, column: str) -> str:
        """The column's name in the parts: an added column may have a prefix there.

        Raises:
            ValueError: there is no such column; the message lists those that there are.
        """
        for name in (self.config["output"].get("prefix", "") + column, column):
            if name in self.columns:
                return name
        raise ValueError(f"{column}: the answers in {self.folder} have no such column; they have {', '.join(self.columns)}")

    def rows(self, part: int, columns: Iterable[str]) -> list[dict[str, Any]]:
        """A part's output rows in order; the keys are ``columns``, without prefix.

        Raises:
            ValueError: the file cannot be read, or it lacks a column; the message names it.
        """
        names = {column: self.name_of(column) for column in columns}
        path = self.folder / self.parts[part].file
        found = read_part(path, list(names.values()))
        return [{column: row[name] for column, name in names.items()} for row in found]

    def settings_of(self, part: int, row_keys: Iterable[str]) -> dict[str, str]:
        """Row key -> the folder below this one whose ``_run.json`` has the row's settings: "" is the run's, else a rerun's.

        A part that was computed again after a rerun, so that its sha256 is no rerun's, is the run's.
        """
        of_part = [merge for merge in self.merges if merge.part == part]
        current = [index for index, merge in enumerate(of_part) if merge.sha256 == self.parts[part].sha256]
        settings = dict.fromkeys(row_keys, "")
        for merge in of_part[: current[-1] + 1] if current else ():
            replaced = {row["row_key"] for row in read_part(merge.replaced(self.folder), ["row_key"], prefix=self._prefix)}
            settings |= dict.fromkeys(replaced & settings.keys(), merge.rerun)
        return settings

    @property
    def _prefix(self) -> str:
        return str(self.config["output"].get("prefix", ""))


def read_part(path: Path, columns: Sequence[str], *, prefix: str = "") -> list[dict[str, Any]]:
    """The rows of a part in any format that has columns; ``prefix`` is before the ``columns``' names there.

    Raises:
        ValueError: it cannot be read or lacks a column; the message names the file.
    """
    try:
        return [{column: row[prefix + column] for column in columns} for row in _read(path, [prefix + column for column in columns])]
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _read(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    if ".jsonl" in path.suffixes:
        with pa.input_stream(str(path), compression="detect") as stream:
            yield from (json.loads(line) for line in stream.read().split(b"\n") if line)
    elif path.suffix == ".parquet":
        yield from pq.ParquetFile(path).read().select(columns).to_pylist()
    else:
        with pa.memory_map(str(path)) as file:
            yield from _ipc_table(file).select(columns).to_pylist()


def _ipc_table(file: pa.NativeFile) -> pa.Table:
    """An Arrow part is an IPC file or an IPC stream, which only its first bytes tell apart."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    return pa.ipc.open_file(file).read_all() if is_file else pa.ipc.open_stream(file).read_all()


def _run_record(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(f"{path.parent}: holds no run: there is no {path.name} in it")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record["config"]["output"]["format"], str) or not isinstance(record["columns"], dict):
            raise TypeError("the settings are not those of a run")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    return dict(record)


def _manifest(path: Path) -> dict[int, list[FinishedPart]]:
    """Part number -> its lines, in the order of the file. A damaged one is refused with what a run makes of it (pipeline.ledger)."""
    values, damaged = durable.readable_lines(path)
    read = [FinishedPart.read(value) for value in values]
    whole = [line for line in read if line is not None]
    if damaged or len(whole) < len(read):
        which = f"line {damaged[0]}" if damaged else f"the line of part {values[read.index(None)].get('part')}"
        heal = "run the same `pagemill run` command again (with resume=auto): it answers the rows of that part anew and keeps the others"
        raise ValueError(
            f"{path}: damaged: {which} is not as it was written; {heal if whole else 'restore it, or use resume=force to start over'}"
        )
    lines: dict[int, list[FinishedPart]] = {}
    for line in whole:
        lines.setdefault(line.part, []).append(line)
    return lines


def _entries(kind: type[Any], path: Path) -> list[Any]:
    return _built(kind, durable.read_lines(path), path=path)


def _built(kind: type[Any], values: Sequence[Mapping[str, Any]], *, path: Path) -> list[Any]:
    try:
        return [kind(**value) for value in values]
    except TypeError as error:
        raise ValueError(f"{path}: damaged: {error}") from error


def _current(folder: Path, lines: Sequence[FinishedPart]) -> FinishedPart:
    """Two lines stand for one part where a rerun was killed between its line and the part's rename."""
    if len(lines) == 1 or not (folder / lines[-1].file).exists():
        return lines[-1]
    digest = durable.file_digest(folder / lines[-1].file)
    return next((line for line in reversed(lines) if line.sha256 == digest), lines[-1])

"""Some rows of a finished run answered again, under other settings, and put in their old ones' places.

The new answers are an ordinary run in a folder of its own below the old one; then part after part is written anew with them. The
replaced rows are kept. It knows no engine and no setting.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import durable
from pipeline.archive import Archive, Merge
from pipeline.columns import OutputColumns, taken
from pipeline.reader import Reader
from pipeline.records import ERROR_KEYS, ERRORS, MANIFEST, RERUNS, FinishedPart, error_line
from pipeline.types import Record, Shard, ShardRows
from pipeline.writer import OutputOptions, PartWriter

Rows = list[dict[str, Any]]

_RECORD = "_rerun.json"
_SELECTION = "_selection.jsonl"


@dataclass(frozen=True, slots=True)
class Condition:
    """``column`` of a row, as text, is ``value``. A null is the text null; truth values are true and false."""

    column: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read ``column=value``. Raises ValueError where it is none."""
        column, separator, value = text.partition("=")
        if not column or not separator:
            raise ValueError(f"--where {text}: write column=value, for example --where finish_reason=length")
        return cls(column, value)

    def holds(self, row: Mapping[str, Any]) -> bool:
        value = row[self.column]
        return self.value == (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """One rerun: its folder, and which input rows of which parts it answers again.

    ``rows`` maps a part to places in its shard, ascending, counted from 0. What is selected is written down before anything
    is computed, so that a rerun that was stopped goes on with the same rows though some of them are replaced already.
    """

    folder: Path
    rows: Mapping[int, Sequence[int]]

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.rows.values()))

    @classmethod
    def begin(cls, archive: Archive, conditions: Sequence[Condition], *, words: Sequence[str]) -> Rerun | None:
        """The rerun that ``words`` asked for and that was stopped, else a new one; None where no row meets ``conditions``.

        A row meets them where one of its samples meets all of them.

        Raises:
            ValueError: a rerun of other words is not finished, a column is unknown, or a part cannot be read.
        """
        folders = sorted(archive.folder.glob("_rerun-[0-9]*"), key=_number)
        unfinished = cls._unfinished(archive, folders[-1], words=words) if folders else None
        if unfinished is not None:
            return unfinished
        rows = {part: places for part in archive.parts if (places := _selected(archive, part, conditions))}
        if not rows:
            return None
        number = 1 + max((_number(folder) for folder in archive.folder.glob("_rerun-[0-9]*")), default=0)
        rerun = cls(folder=archive.folder / f"_rerun-{number:03d}", rows=rows)
        (rerun.folder / "replaced").mkdir(parents=True)
        lines = (durable.json_line({"part": part, "rows": list(places)}) for part, places in rows.items())
        durable.replace_text(rerun.folder / _SELECTION, "".join(lines))
        rerun.note(words, merged=False)
        return rerun

    @classmethod
    def _unfinished(cls, archive: Archive, folder: Path, *, words: Sequence[str]) -> Rerun | None:
        """The rerun in ``folder`` where it is to go on; None where it is finished. One that has no answers yet is taken away."""
        record = _read_record(folder / _RECORD)
        if record.get("merged"):
            return None
        if record.get("words") == list(words):
            return cls(folder=folder, rows=_read_selection(folder))
        if any(folder.glob("part-*")):
            earlier = shlex.join(["pagemill", "rerun", str(archive.folder), *map(str, record.get("words") or ())])
            is_merged = any(merge.rerun == folder.name for merge in archive.merges)
            rest = "" if is_merged else ", or delete that folder, of which nothing has been put into the parts yet"
            raise ValueError(f"{folder}: an earlier rerun is not finished; run it to its end first ({earlier}){rest}")
        shutil.rmtree(folder)
        return None

    def note(self, words: Sequence[str], *, merged: bool) -> None:
        """Write down what was asked for and how far it is."""
        record = {"words": list(words), "rows": self.num_rows, "merged": merged}
        durable.replace_text(self.folder / _RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n")

    def reader(self, archive: Archive, whole: Reader) -> Reader:
        """A reader of the selected rows, given one of all rows.

        Raises:
            ValueError: the input is not what it was; the message names the file.
        """
        return _SelectedReader(whole, {archive.shards[part]: rows for part, rows in self.rows.items()})

    def merge(self, archive: Archive, *, reader: Reader, columns: OutputColumns, writer: PartWriter) -> None:
        """Put the new answers, which are all there, into their parts; killed at any moment, it can be called again.

        Every part is written whole under a temporary name. Its lines in ``_reruns.jsonl`` and ``_manifest.jsonl`` come before the
        rename: the sha256 tells which of two lines a part agrees with.
        """
        answers = Archive.open(self.folder)
        sources = {(shard.file, shard.first_row): part for part, shard in answers.shards.items()}
        added = columns.schema.names[len(reader.schema.names) :]
        names = [name.removeprefix(str(archive.config["output"]["prefix"])) for name in added]
        own = [merge for merge in archive.merges if merge.rerun == self.folder.name]
        merged = {merge.part for merge in own if merge.sha256 == archive.parts[merge.part].sha256}
        parts = [part for part in self.rows if part not in merged]
        for part, read in zip(parts, reader.read([archive.shards[part] for part in parts]), strict=True):
            shard = archive.shards[part]
            old = _by_row(archive.rows(part, names))
            new = _by_row(answers.rows(sources[shard.file, shard.first_row], names))
            self._keep(part, read.table, old, columns=columns)
            rows = [new.get(key, samples) for key, samples in old.items()]
            self._replace(archive, part, table=columns.table(read.table, rows), rows=list(itertools.chain(*rows)), writer=writer)
        _settle(archive, self.rows)

    def _keep(self, part: int, carried: pa.Table, old: Mapping[str, Rows], *, columns: OutputColumns) -> None:
        """Write the rows that are about to be replaced, whole, to ``replaced/``."""
        places = list(self.rows[part])
        kept = list(old.values())
        path = Merge(rerun=self.folder.name, part=part, rows=len(places), sha256="").replaced(self.folder.parent)
        temporary = path.with_name(path.name + ".tmp")
        table = columns.table(taken(carried, places), [kept[place] for place in places])
        PartWriter(OutputOptions(path=str(path.parent)), schema=table.schema).write(temporary, table)
        durable.rename(temporary, path)

    def _replace(self, archive: Archive, part: int, *, table: pa.Table, rows: Rows, writer: PartWriter) -> None:
        final = archive.folder / archive.parts[part].file
        temporary = final.with_name(final.name + ".tmp")
        writer.write(temporary, table)
        line = FinishedPart.of(part, temporary, file=final.name, rows=rows)
        merge = Merge(rerun=self.folder.name, part=part, rows=len(self.rows[part]), sha256=line.sha256)
        durable.append_lines(archive.folder / RERUNS, [asdict(merge)])
        durable.append_lines(archive.folder / MANIFEST, [line.line()])
        durable.rename(temporary, final)


class _SelectedReader:
    """A reader that gives some of another one's rows, under their own row keys; see ``pipeline.reader.Reader``."""

    def __init__(self, reader: Reader, rows: Mapping[Shard, Sequence[int]]) -> None:
        """Raises ValueError where the input has not the shards any more that ``rows`` names."""
        self.schema = reader.schema
        self._reader = reader
        there = set(reader.shards)
        for shard in rows:
            if shard not in there:
                raise ValueError(f"input.path: rows {shard.first_row} and on of {shard.file} have changed since they were answered")
        self._sources = {_part_of(shard, places): (shard, places) for shard, places in rows.items()}
        self.shards = list(self._sources)

    def read(self, shards: Iterable[Shard]) -> Iterator[ShardRows]:
        wanted = list(shards)
        sources = [self._sources[shard] for shard in wanted]
        for shard, (_, places), read in zip(wanted, sources, self._reader.read([source for source, _ in sources]), strict=True):
            yield ShardRows(shard, taken(read.table, places), _renumbered(read.records, places))


def _part_of(shard: Shard, places: Sequence[int]) -> Shard:
    digest = hashlib.sha256(f"{shard.digest}:{','.join(map(str, places))}".encode()).hexdigest()
    return replace(shard, num_rows=len(places), digest=digest)


def _renumbered(records: Iterable[Record], places: Sequence[int]) -> Iterator[Record]:
    index_of = {place: index for index, place in enumerate(places)}
    return (replace(record, index=index_of[record.index]) for record in records if record.index in index_of)


def _selected(archive: Archive, part: int, conditions: Sequence[Condition]) -> list[int]:
    rows = archive.rows(part, dict.fromkeys(["row_key", *(condition.column for condition in conditions)]))
    samples = _by_row(rows).values()
    return [place for place, some in enumerate(samples) if any(all(condition.holds(row) for condition in conditions) for row in some)]


def _by_row(rows: Rows) -> dict[str, Rows]:
    """Row key -> its samples, in the order of the part."""
    return {key: list(samples) for key, samples in itertools.groupby(rows, key=lambda row: row["row_key"])}


def _settle(archive: Archive, parts: Iterable[int]) -> None:
    """Write errors.jsonl anew for ``parts``, and leave each part the one line of the manifest that it agrees with."""
    now = Archive.open(archive.folder)
    errors = [line for line in durable.read_lines(now.folder / ERRORS) if line["part"] not in set(parts)]
    for part in parts:
        failed = (row for row in now.rows(part, [*ERROR_KEYS, "status"]) if row["status"] == "error")
        errors += (error_line(part, row) for row in failed)
    if errors:
        durable.replace_text(now.folder / ERRORS, "".join(map(durable.json_line, errors)))
    else:
        (now.folder / ERRORS).unlink(missing_ok=True)
    durable.replace_text(now.folder / MANIFEST, "".join(durable.json_line(line.line()) for line in now.parts.values()))


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("_rerun-"))


def _read_selection(folder: Path) -> dict[int, list[int]]:
    try:
        return {line["part"]: line["rows"] for line in durable.read_lines(folder / _SELECTION)}
    except KeyError as error:
        raise ValueError(f"{folder / _SELECTION}: damaged: a line lacks {error}") from error


def _read_record(path: Path) -> dict[str, Any]:
    """The rerun's own note; empty where it was killed before it could write one."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: damaged: {error}") from error

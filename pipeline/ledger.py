"""What is done and what is left in one output folder, and for which settings.

Knows no rows and no engine: it maps shards to parts and keeps the run's record beside them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import pyarrow as pa

from pipeline import durable
from pipeline.types import Part, Shard

Resume = Literal["auto", "never", "force"]

_RECORDS = ("_run.json", "_manifest.jsonl", "_shards.jsonl")
_WRITTEN = (*_RECORDS, "_reruns.jsonl", "errors.jsonl", "metrics.json")

_Entry = TypeVar("_Entry", "FinishedPart", Shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the answers come from, as JSON values that the job fills in.

    ``config`` is the whole resolved configuration and ``versions`` the libraries', both for the record only.
    ``fingerprint`` holds what changes answers: another one does not go into the same folder.
    """

    config: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPart:
    """One line of ``_manifest.jsonl``; ``rows`` counts output rows, ``errors`` those of them that failed."""

    part: int
    file: str
    rows: int
    errors: int
    cut: int
    first_row_id: str
    last_row_id: str
    sha256: str
    bytes: int


class Ledger:
    """The record of one output folder.

    ``_run.json`` tells settings and versions, ``_shards.jsonl`` which rows belong to which part, ``_manifest.jsonl``
    which parts are finished, ``errors.jsonl`` which rows failed. A part's lines are written before the part gets its
    name, so a part that exists always has them; lines whose part does not exist are dropped when the folder is opened.
    """

    def __init__(self, folder: Path, *, suffix: str) -> None:
        self.folder = folder
        self.finished: dict[int, FinishedPart] = {}
        self._suffix = suffix
        self._shards: dict[int, Shard] = {}

    @classmethod
    def open(cls, path: str, *, suffix: str, provenance: Provenance, schema: pa.Schema, resume: Resume) -> Ledger:
        """Open the folder ``path`` for one run, and make it where it is missing.

        Raises:
            ValueError: the folder cannot be written, holds parts of other settings (with the differences), or
                is not empty where ``resume`` is "never".
        """
        if resume not in ("auto", "never", "force"):
            raise ValueError(f"resume: {resume!r} is not one of auto, never, force")
        ledger = cls(Path(path), suffix=suffix)
        try:
            ledger.folder.mkdir(parents=True, exist_ok=True)
            ledger._open(provenance, schema=schema, resume=resume)
        except OSError as error:
            raise ValueError(f"output.path: {path!r} cannot be written: {error.strerror}") from error
        return ledger

    def assign(self, shards: Sequence[Shard]) -> list[Part]:
        """A part for every shard, in their order: known shards keep theirs, new ones get the next numbers.

        Raises:
            ValueError: the rows of a finished part have changed since; the message names the file.
        """
        known = {(shard.file, shard.first_row): index for index, shard in self._shards.items()}
        parts, added = [], []
        following = max(self._shards, default=-1) + 1
        for shard in shards:
            index = known.get((shard.file, shard.first_row))
            if index is None:
                index, following = following, following + 1
            if self._shards.get(index) != shard:
                if index in self.finished:
                    raise ValueError(
                        f"output.path: {self.finished[index].file} holds the answers to rows {shard.first_row} and on of {shard.file}, "
                        "which have changed since (the file, input.rows_per_shard or limit); use another output.path or resume=force"
                    )
                self._shards[index] = shard
                added.append({"part": index, **asdict(shard)})
            parts.append(Part(index, shard))
        durable.append_lines(self.folder / "_shards.jsonl", added)
        return parts

    def commit(self, part: Part, *, write: Callable[[Path], None], rows: Sequence[Mapping[str, Any]]) -> FinishedPart:
        """Finish ``part``: ``write`` makes its file under a temporary name; ``rows`` are all its output rows' values."""
        final = self.folder / (part.stem + self._suffix)
        temporary = _temporary(final)
        write(temporary)
        failed = [row for row in rows if row["status"] == "error"]
        finished = FinishedPart(
            part=part.index,
            file=final.name,
            rows=len(rows),
            errors=len(failed),
            cut=sum(row["finish_reason"] == "length" for row in rows),
            first_row_id=rows[0]["row_id"],
            last_row_id=rows[-1]["row_id"],
            sha256=durable.file_digest(temporary),
            bytes=temporary.stat().st_size,
        )
        keys = ("row_key", "row_id", "error_code", "error_message")
        if failed:
            durable.append_lines(self.folder / "errors.jsonl", ({"part": part.index} | {key: row[key] for key in keys} for row in failed))
        durable.append_lines(self.folder / "_manifest.jsonl", [asdict(finished)])
        durable.rename(temporary, final)
        self.finished[part.index] = finished
        return finished

    def _open(self, provenance: Provenance, *, schema: pa.Schema, resume: Resume) -> None:
        record = _run_record(provenance, schema=schema)
        foreign = sorted(path.name for path in self._parts())
        if foreign and not any((self.folder / name).exists() for name in _RECORDS):
            raise ValueError(
                f"output.path: {str(self.folder)!r} holds {foreign[0]} but no record of a run, so it is somebody else's; use another folder"
            )
        if resume == "never" and any(self.folder.iterdir()):
            raise ValueError(f"output.path: the folder {str(self.folder)!r} is not empty and resume=never; choose another")
        if resume == "auto":
            self._load()
            if self.finished:
                self._refuse_other_settings(record)
        if not self.finished:
            self._clear()
        durable.replace_text(self.folder / "_run.json", json.dumps(record, indent=2, ensure_ascii=False) + "\n")

    def _load(self) -> None:
        """Read what is there, finish a commit that was interrupted, and drop what belongs to no finished part."""
        for line in _entries(FinishedPart, durable.read_lines(self.folder / "_manifest.jsonl"), name="_manifest.jsonl"):
            final = self.folder / line.file
            written = _temporary(final)
            if not final.exists() and written.exists() and durable.file_digest(written) == line.sha256:
                durable.rename(written, final)
            if final.exists() and final.stat().st_size != line.bytes:
                raise ValueError(
                    f"output.path: {final} has {final.stat().st_size:,} bytes, but {line.bytes:,} when it was finished; "
                    "take it away and run again to have its rows answered anew"
                )
            if final.exists():
                self.finished[line.part] = line
        lines = durable.read_lines(self.folder / "_shards.jsonl")
        indices = [line.pop("part", -1) for line in lines]
        self._shards = dict(zip(indices, _entries(Shard, lines, name="_shards.jsonl"), strict=True))
        unknown = sorted({path.name for path in self._parts()} - {line.file for line in self.finished.values()})
        if unknown:
            raise ValueError(
                f"output.path: {str(self.folder)!r} holds {unknown[0]}, which its _manifest.jsonl does not know; "
                "use another output.path, or resume=force to start over"
            )
        errors = durable.read_lines(self.folder / "errors.jsonl")
        self._rewrite("_manifest.jsonl", (asdict(line) for line in self.finished.values()))
        self._rewrite("_shards.jsonl", ({"part": index, **asdict(shard)} for index, shard in self._shards.items()))
        self._rewrite("errors.jsonl", (error for error in errors if error["part"] in self.finished))
        for stale in self.folder.glob("part-*.tmp"):
            stale.unlink()

    def _rewrite(self, name: str, values: Iterable[Mapping[str, Any]]) -> None:
        path = self.folder / name
        text = "".join(durable.json_line(value) for value in values)
        if path.exists() and path.read_text(encoding="utf-8") != text:
            durable.replace_text(path, text)

    def _parts(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("part-[0-9]*") if path.suffix != ".tmp")

    def _clear(self) -> None:
        """Take away everything that an earlier run wrote, and nothing else."""
        self._shards = {}
        names = ("part-[0-9]*", "errors-[0-9]*")
        for path in [*(path for name in names for path in self.folder.glob(name)), *(self.folder / name for name in _WRITTEN)]:
            path.unlink(missing_ok=True)
        for rerun in self.folder.glob("_rerun-[0-9]*"):
            shutil.rmtree(rerun)
        durable.sync_folder(self.folder)

    def _refuse_other_settings(self, record: Mapping[str, Any]) -> None:
        path = self.folder / "_run.json"
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{path}: missing or damaged, so the parts' settings are unknown; use resume=force to start over") from error
        differences = [line for key in ("fingerprint", "columns") for line in _differences(before[key], record[key], name=key)]
        if differences:
            raise ValueError(
                f"output.path: {str(self.folder)!r} holds parts made with other settings:\n  "
                + "\n  ".join(differences)
                + "\nuse another output.path, or resume=force to start over"
            )


def _entries(kind: type[_Entry], lines: Iterable[Mapping[str, Any]], *, name: str) -> list[_Entry]:
    try:
        return [kind(**line) for line in lines]
    except TypeError as error:
        raise ValueError(
            f"output.path: a line of {name} has other keys than this version writes; use resume=force to start over"
        ) from error


def _run_record(provenance: Provenance, *, schema: pa.Schema) -> dict[str, Any]:
    columns = {field.name: str(field.type) for field in schema}
    values = {"config": provenance.config, "fingerprint": provenance.fingerprint, "versions": provenance.versions, "columns": columns}
    record: dict[str, Any] = json.loads(json.dumps(values))
    return record


def _differences(before: Any, now: Any, *, name: str) -> Iterator[str]:
    """One line for every leaf that is not equal: where, what it was, what it is."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), name=f"{name}.{key}")
    elif before != now:
        yield f"{name}: was {json.dumps(before)}, is {json.dumps(now)}"


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")

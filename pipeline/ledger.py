"""What is done and what is left in one output folder.

Knows no rows, no engine and no file format: it maps shards to parts and keeps the record of both beside them.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pipeline import durable
from pipeline.folder import OutputFolder
from pipeline.provenance import RunRecord, read_record
from pipeline.records import ERRORS, MANIFEST, RERUNS, RUN, SHARDS, FinishedPart, entry, error_line
from pipeline.types import Part, Shard

Resume = Literal["auto", "never", "force"]

_RECORDS = (RUN, MANIFEST, SHARDS)
_WRITTEN = (*_RECORDS, RERUNS, ERRORS, "metrics.json")
_PART = re.compile(r"part-(\d{5,})\.(?!tmp)[\w.]+(?<!\.tmp)")  # no folder in it, so a record cannot lead out of this one
_MADE = re.compile(r"(part|errors)-\d{5,}\.[\w.]+")  # parts, finished or not, and what their writers put beside them
_LOG = logging.getLogger(__name__)


class Ledger:
    """The record of one output folder.

    ``_run.json`` tells settings and versions, ``_shards.jsonl`` which rows belong to which part, ``_manifest.jsonl``
    which parts are finished, ``errors.jsonl`` which rows failed. A part's lines are written before the part gets its
    name, so a part that exists always has them; lines whose part does not exist are dropped when a run starts. A part
    that is not what its line says is set aside under a name that begins with ``_damaged-``, and its rows are open again.

    Attributes:
        finished: the parts that are done, by index.
    """

    def __init__(self, folder: OutputFolder, *, resume: Resume) -> None:
        """Look at ``folder``, and change nothing in it.

        Raises:
            ValueError: it is somebody else's, its record is damaged, or it is not empty where ``resume`` is "never".
        """
        if resume not in ("auto", "never", "force"):
            raise ValueError(f"resume: {resume!r} is not one of auto, never, force")
        self.folder = folder
        self.finished: dict[int, FinishedPart] = {}
        self._shards: dict[int, Shard] = {}
        self._unfinished_commits: list[str] = []
        self._damaged: list[str] = []
        self._resume = resume
        self._fetch()
        self._refuse_foreign()
        if resume == "auto":
            self._read_shards()
            self._read_manifest()
        self._goes_on = bool(self.finished or self._damaged or (resume == "auto" and any(self._working_parts())))
        if not self._goes_on:
            self._shards = {}

    @property
    def shards(self) -> list[Shard]:
        """The shards that are known so far, in the order of their parts."""
        return [self._shards[index] for index in sorted(self._shards)]

    def refuse_other(self, record: RunRecord) -> None:
        """Raises ValueError where the folder holds answers that were made under other settings."""
        if self._goes_on:
            record.refuse_other(self.folder.path / RUN)

    def assign(self, shards: Sequence[Shard]) -> list[Part]:
        """A part for every shard, in their order: known shards keep theirs, new ones get the next numbers.

        Parts of rows that the input has no more stay, and a warning counts them.

        Raises:
            ValueError: the rows of a finished part have changed since; the message names the file.
        """
        known = {(shard.file, shard.first_row): index for index, shard in self._shards.items()}
        parts = []
        following = max(self._shards, default=-1) + 1
        for shard in shards:
            index = known.get((shard.file, shard.first_row))
            if index is None:
                index, following = following, following + 1
            if index in self.finished and self._shards[index] != shard:
                raise ValueError(
                    f"output.path: {self.finished[index].file} holds the answers to rows {shard.first_row} and on of {shard.file}, "
                    "which have changed since (the file, or limit); use another output.path or resume=force"
                )
            self._shards[index] = shard
            parts.append(Part(index, shard))
        gone = [self.finished[index].file for index in sorted(set(self.finished) - {part.index for part in parts})]
        if gone:
            _LOG.warning("output.path: %d finished parts stay, whose rows the input has no more; the first is %s", len(gone), gone[0])
        return parts

    def start(self, record: RunRecord, *, max_model_len: int | None) -> None:
        """Make the folder agree with what was read, and write the record; nothing in it was changed before.

        ``max_model_len`` is the context of the engine that will run, None where all is done already and the record stays.

        Raises:
            ValueError: finished rows met the context's end, and it is at another place now.
        """
        if max_model_len is not None and self._goes_on:
            self._refuse_other_context(max_model_len)
        if not self._goes_on:
            self._clear()
        for name in self._unfinished_commits:
            self.folder.rename(_temporary(name), name)
        for name in self._damaged:
            _LOG.warning(
                "%s/%s is not what _manifest.jsonl says; its rows run again, and it is kept as _damaged-%s", self.folder.name, name, name
            )
            self.folder.rename(name, f"_damaged-{name}")
        waiting = self.folder.waiting([line.file for line in self.finished.values()])
        self.folder.deliver(_RECORDS, parts=[file for name in waiting for file in self._files_of(name)])
        if max_model_len is not None:
            record.write(self.folder.path / RUN, max_model_len=max_model_len)
        self._rewrite(MANIFEST, (part.line() for part in self.finished.values()))
        self._rewrite(SHARDS, ({"part": index, **asdict(shard)} for index, shard in sorted(self._shards.items())))
        errors, _ = durable.readable_lines(self.folder.path / ERRORS)
        self._rewrite(ERRORS, (error for error in errors if error.get("part") in list(self.finished)))
        done = {self.working_part(index) for index in self.finished}
        left = (path for pattern in ("part-*.*.tmp", "part-*.new") for path in self.folder.path.glob(pattern))
        stale = [*(path for path in left if _MADE.fullmatch(path.name)), *(done & set(self._working_parts()))]
        for path in stale:
            path.unlink()
        self.folder.deliver(_WRITTEN)

    def working_part(self, index: int) -> Path:
        """Where the answers of a part lie that is not finished."""
        return self.folder.path / f"part-{index:05d}.tmp"

    def commit(self, part: Part, *, suffix: str, write: Callable[[Path], None], rows: Sequence[Mapping[str, Any]]) -> FinishedPart:
        """Finish ``part``: ``write`` makes its file under a temporary name; ``rows`` are all its output rows' values."""
        name = part.stem + suffix
        temporary = self.folder.path / _temporary(name)
        write(temporary)
        failed = [row for row in rows if row["status"] == "error"]
        finished = FinishedPart.of(part.index, temporary, file=name, rows=rows)
        if failed:
            durable.append_lines(self.folder.path / ERRORS, (error_line(part.index, row) for row in failed))
        durable.append_lines(self.folder.path / MANIFEST, [finished.line()])
        durable.rename(temporary, self.folder.path / name)
        self.working_part(part.index).unlink(missing_ok=True)
        self.folder.deliver([MANIFEST, ERRORS] if failed else [MANIFEST], parts=self._files_of(name))
        self.finished[part.index] = finished
        return finished

    def _refuse_other_context(self, max_model_len: int) -> None:
        before = read_record(self.folder.path / RUN).get("max_model_len")
        met = sum(part.at_context for part in self.finished.values())
        if met and before != max_model_len:
            raise ValueError(
                f"output.path: {met:,} finished rows met the end of a context of {before} tokens, and now it ends at {max_model_len}; "
                "set engine.max_model_len, kv_cache.memory or kv_cache.num_blocks so that it is the same, or use another output.path"
            )

    def _fetch(self) -> None:
        parts = [name for name in self.folder.names() if _PART.fullmatch(name)]
        self.folder.fetch([*_RECORDS, ERRORS], waiting=bool(self.folder.waiting(parts)))

    def _refuse_foreign(self) -> None:
        there = self.folder.names()
        names = sorted(name for name in there if name in _WRITTEN or (_MADE.fullmatch(name) and not name.endswith(".tmp")))
        if names and not set(names) & set(_RECORDS):
            raise ValueError(
                f"output.path: {self.folder.name!r} holds {names[0]} but no record of a run, so it is somebody else's; use another folder"
            )
        if self._resume == "never" and there:
            raise ValueError(f"output.path: the folder {self.folder.name!r} is not empty and resume=never; choose another")

    def _read_shards(self) -> None:
        for line in durable.read_lines(self.folder.path / SHARDS):
            index = line.pop("part", None)
            shard = entry(Shard, line)
            if shard is None or not isinstance(index, int):
                raise ValueError(
                    f"output.path: a line of {SHARDS} has other keys than it should; restore it, or use resume=force to start over"
                )
            self._shards[index] = shard

    def _read_manifest(self) -> None:
        """Find out which parts are finished; those that no line vouches for are damaged."""
        there = self.folder.names()
        values, _ = durable.readable_lines(self.folder.path / MANIFEST)
        lines = [line for value in values if (line := FinishedPart.read(value)) is not None]
        for line in lines:
            if not _is_named(line):
                continue
            if line.part not in self._shards:
                raise ValueError(
                    f"output.path: {SHARDS} in {self.folder.name!r} does not know part {line.part}, which {MANIFEST} has; "
                    "restore it, or use resume=force to start over"
                )
            if self.folder.holds(line.file, num_bytes=line.bytes, sha256=line.sha256):
                self.finished[line.part] = line
            elif line.file not in there and self.folder.holds(_temporary(line.file), num_bytes=line.bytes, sha256=line.sha256):
                self.finished[line.part] = line
                self._unfinished_commits.append(line.file)
        known = {line.file for line in self.finished.values()}
        self._damaged = sorted(name for name in there - known if _PART.fullmatch(name))
        if self._damaged and not lines:
            raise ValueError(
                f"output.path: {self.folder.name!r} holds {self._damaged[0]}, which its {MANIFEST} does not know; "
                "restore it, use another output.path, or resume=force to start over"
            )

    def _rewrite(self, name: str, values: Iterable[Mapping[str, Any]]) -> None:
        path = self.folder.path / name
        text = "".join(durable.json_line(value) for value in values)
        if text.encode() != (path.read_bytes() if path.exists() else b""):
            durable.replace_text(path, text)

    def _files_of(self, name: str) -> list[str]:
        """A part and what its writer put beside it, the part last."""
        return sorted(path.name for path in self.folder.path.glob("[a-z]*" + name.removeprefix("part")))

    def _working_parts(self) -> Iterator[Path]:
        return (path for path in self.folder.path.glob("part-*.tmp") if path.name.count(".") == 1 and _MADE.fullmatch(path.name))

    def _clear(self) -> None:
        """Take away everything that an earlier run wrote, and nothing else; the settings go last."""
        there = self.folder.names()
        if not set(there) & set(_RECORDS):
            return
        made = sorted(name for name in there if _MADE.fullmatch(name))
        for name in [*made, *(name for name in reversed(_WRITTEN) if name in there)]:
            self.folder.remove(name)
        for rerun in self.folder.path.glob("_rerun-[0-9]*"):
            shutil.rmtree(rerun)
        durable.sync_folder(self.folder.path)


def _is_named(line: FinishedPart) -> bool:
    match = _PART.fullmatch(line.file)
    return match is not None and int(match[1]) == line.part


def _temporary(name: str) -> str:
    return name + ".tmp"

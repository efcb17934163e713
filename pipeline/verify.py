"""Is an output folder what its record says, and do its rows come out again? Differences as sentences, none where all is well.

Knows the folder through pipeline.archive and never changes it; which engine answers is the caller's choice.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from engine import Completion
from pipeline import durable
from pipeline.archive import Archive
from pipeline.asking import ask
from pipeline.job import Job
from pipeline.reader import Reader
from pipeline.records import ERROR_KEYS, ERRORS, FinishedPart
from pipeline.runner import Engine
from pipeline.types import RowError, Shard

_ROW = (*ERROR_KEYS, "sample_index", "status", "finish_reason")
# What a job computes from log probabilities may differ in its last digits between two runs (see the contract's columns).
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Chosen:
    """An ok row that is to be computed again, and the part that holds it."""

    part: int
    row_key: str


@dataclass(slots=True)
class Found:
    """What reading all parts showed: differences, the rows that were seen, and a fair sample of those that are ok."""

    differences: list[str] = field(default_factory=list)
    num_rows: int = 0
    num_errors: int = 0
    chosen: list[Chosen] = field(default_factory=list)


def check_parts(archive: Archive, *, num_chosen: int, seed: int) -> Found:
    """Compare every part with ``_manifest.jsonl``, ``_shards.jsonl`` and ``errors.jsonl``, and choose ``num_chosen`` ok rows.

    Raises:
        ValueError: a record is damaged; the message names it.
    """
    found = Found()
    sample = _Sample(num_chosen, dice=random.Random(seed))
    errors = _errors_by_part(archive)
    for index, line in archive.parts.items():
        path = archive.folder / line.file
        if not path.exists():
            found.differences.append(f"{line.file}: _manifest.jsonl says that it is finished, but it is not there")
            continue
        found.differences += _file_differences(archive, line)
        if not archive.has_rows:
            continue
        try:
            rows = archive.rows(index, _ROW)
        except ValueError as error:
            found.differences.append(str(error))
            continue
        found.num_rows += len(rows)
        found.num_errors += sum(row["status"] == "error" for row in rows)
        found.differences += (f"{line.file}: {what}" for what in _row_differences(rows, line, archive.shards[index], errors.get(index, [])))
        for row in rows:
            if row["status"] == "ok" and row["sample_index"] == 0:
                sample.offer(Chosen(index, row["row_key"]))
    known = {line.file for line in archive.parts.values()}
    strangers = sorted(path.name for path in archive.folder.glob("part-[0-9]*") if path.suffix != ".tmp" and path.name not in known)
    found.differences += (f"{name}: _manifest.jsonl does not know it" for name in strangers)
    found.chosen = sorted(sample.taken, key=lambda chosen: chosen.part)
    return found


def check_rows(archive: Archive, chosen: Sequence[Chosen], *, job: Job, reader: Reader, engine: Engine) -> Iterator[str]:
    """Compute each of ``chosen`` again, alone, and yield what differs: a sentence for each row.

    Raises:
        ValueError: the input is not what it was; the message names the file.
    """
    names = [field.name for field in job.fields]
    tokens = ["token_ids"] if _has(archive, "token_ids") else []
    for index, group in itertools.groupby(chosen, key=lambda one: one.part):
        wanted = {one.row_key for one in group}
        shard = archive.shards[index]
        if shard not in reader.shards:
            raise ValueError(
                f"input.path: {shard.file} is not what it was when {archive.parts[index].file} was made, so its rows cannot be asked again"
            )
        before: dict[str, list[dict[str, Any]]] = {}
        for row in archive.rows(index, [*_ROW, "generation", *tokens, *names]):
            before.setdefault(row["row_key"], []).append(row)
        records = (record for record in next(iter(reader.read([shard]))).records if record.row_key in wanted)
        for record, asked, _ in itertools.chain.from_iterable(ask(job, records)):
            try:
                if isinstance(asked, RowError):
                    raise asked
                now = sorted(engine.generate([asked]), key=lambda completion: completion.sample_index)
                what = _answer_difference(before[record.row_key], now, job=job, compare_tokens=bool(tokens))
            except RowError as error:
                what = f"was ok, is an error row now: {error.code}: {error.message}"
            if what is not None:
                yield f"{record.row_key}: {what}"


class _Sample:
    """Reservoir sampling (Vitter's algorithm R): each of the rows offered is kept with the same chance."""

    def __init__(self, size: int, *, dice: random.Random) -> None:
        self.taken: list[Chosen] = []
        self._size = size
        self._dice = dice
        self._num_offered = 0

    def offer(self, row: Chosen) -> None:
        self._num_offered += 1
        if len(self.taken) < self._size:
            self.taken.append(row)
        elif (place := self._dice.randrange(self._num_offered)) < self._size:
            self.taken[place] = row


def _has(archive: Archive, column: str) -> bool:
    try:
        archive.name_of(column)
    except ValueError:
        return False
    return True


def _errors_by_part(archive: Archive) -> dict[int, list[Mapping[str, Any]]]:
    errors: dict[int, list[Mapping[str, Any]]] = {}
    for line in durable.read_lines(archive.folder / ERRORS):
        part = line.get("part")
        errors.setdefault(part if isinstance(part, int) else -1, []).append(line)
    return errors


def _file_differences(archive: Archive, line: FinishedPart) -> Iterator[str]:
    path = archive.folder / line.file
    size, digest = path.stat().st_size, durable.file_digest(path)
    if size != line.bytes:
        yield f"{line.file}: has {size:,} bytes, _manifest.jsonl says {line.bytes:,}"
    if digest != line.sha256:
        yield f"{line.file}: its sha256 is {digest}, _manifest.jsonl says {line.sha256}"


def _row_differences(
    rows: Sequence[Mapping[str, Any]], line: FinishedPart, shard: Shard, errors: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """The part's rows against its line, its shard and its lines of errors.jsonl."""
    failed = [row for row in rows if row["status"] == "error"]
    cut = sum(row["finish_reason"] == "length" for row in rows)
    for what, is_now, said in (("rows", len(rows), line.rows), ("error rows", len(failed), line.errors), ("rows cut", cut, line.cut)):
        if is_now != said:
            yield f"has {is_now:,} {what}, _manifest.jsonl says {said:,}"
    if rows and (rows[0]["row_id"], rows[-1]["row_id"]) != (line.first_row_id, line.last_row_id):
        yield (
            f"goes from {rows[0]['row_id']!r} to {rows[-1]['row_id']!r}, "
            f"_manifest.jsonl says from {line.first_row_id!r} to {line.last_row_id!r}"
        )
    keys = [key for key, _ in itertools.groupby(row["row_key"] for row in rows)]
    expected = [f"{shard.file}:{shard.first_row + index}" for index in range(shard.num_rows)]
    if keys != expected:
        wrong = next((pair for pair in itertools.zip_longest(keys, expected) if pair[0] != pair[1]), (None, None))
        yield f"its rows are not those of _shards.jsonl: {wrong[0]} stands where {wrong[1]} belongs"
    for key, samples in itertools.groupby(rows, key=lambda row: row["row_key"]):
        indices = [row["sample_index"] for row in samples]
        if indices != list(range(len(indices))):
            yield f"the samples of {key} are numbered {indices}"
    in_part, in_file = ({tuple(row.get(key) for key in ERROR_KEYS) for row in some} for some in (failed, errors))
    if in_part != in_file:
        first = min(in_part ^ in_file, key=str)
        yield f"its error rows are not those of errors.jsonl: {first[0]} is in one of them only, or with other words"


def _answer_difference(before: Sequence[Mapping[str, Any]], now: Sequence[Completion], *, job: Job, compare_tokens: bool) -> str | None:
    """What differs first between a row's answers and those that it gets now; None where nothing does."""
    if now[0].finish_reason == "error":
        return f"was ok, is an error row now: {now[0].error_code}: {now[0].error_message}"
    if len(before) != len(now):
        return f"had {len(before)} samples, has {len(now)} now"
    for row, completion in zip(before, now, strict=True):
        sample = f"sample {completion.sample_index}: " if len(now) > 1 else ""
        answer = {"finish_reason": completion.finish_reason, **job.answer(completion)}
        if compare_tokens and row["token_ids"] != list(completion.token_ids):
            return sample + _first_difference(row["token_ids"] or [], completion.token_ids, what="token")
        if row["generation"] != answer.get("generation"):
            return sample + _first_difference(row["generation"] or "", answer.get("generation") or "", what="character")
        for column in (pa.field("finish_reason", pa.string()), *job.fields):
            value = pa.scalar(answer.get(column.name), type=column.type).as_py()
            if not _agree(row[column.name], value):
                return f"{sample}{column.name} was {row[column.name]!r}, is {value!r} now"
    return None


def _first_difference(before: Sequence[Any], now: Sequence[Any], *, what: str) -> str:
    place = next((place for place, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), min(len(before), len(now)))
    shown = [repr(values[place]) if place < len(values) else "the end" for values in (before, now)]
    return f"{what} {place} was {shown[0]}, is {shown[1]} now ({len(before)} and {len(now)} {what}s)"


def _agree(before: Any, now: Any) -> bool:
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE) or (math.isnan(before) and math.isnan(now))
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_agree, before, now))
    return bool(before == now)

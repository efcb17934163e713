"""JSON Lines, plain or compressed (gzip, zstd, bzip2): one UTF-8 object a line, read by one strict parser.

Blank lines are skipped, CRLF and a leading byte order mark are taken off, a repeated key's last value wins, NaN and
Infinity are refused, strings are never taken for dates. A line that is no such object, or nested over 128 deep, is an
error row with all columns null; half of a surrogate pair makes an error row too, with U+FFFD in its place. Types: see ``_json_types``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from pipeline.reader import SHARD_BYTES, InputFile
from pipeline.readers._json_types import JsonType
from pipeline.readers._lines import open_lines, text_start
from pipeline.types import Record, RowError, Shard, ShardRows

SUFFIXES = tuple(stem + packed for stem in (".jsonl", ".ndjson", ".json") for packed in ("", ".gz", ".zst", ".bz2"))

_MAX_DEPTH = 128  # far under what Python's own recursion takes
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def scan(
    files: Sequence[InputFile],
    *,
    rows_per_shard: int,
    columns: Sequence[str] | None,
    prompt_columns: Sequence[str],
    limit: int | None,
) -> JsonlReader:
    """Parse every line once for shards and column types; see ``pipeline.reader.Format``.

    A file without any of ``prompt_columns`` is not refused: its rows are error rows, like any row that lacks them.
    """
    del prompt_columns
    types: dict[str, JsonType] = {}
    shards: list[Shard] = []
    remaining = math.inf if limit is None else limit
    for file in files:
        if remaining > 0:
            found = list(_scan_file(file, types=types, rows_per_shard=rows_per_shard, columns=columns, limit=remaining))
            remaining -= sum(shard.num_rows for shard in found)
            shards += found
    if shards and not types:
        raise ValueError(
            f"input.path: no line is an object with keys; the first is in {_first_line(files, shards[0])}; "
            "for files of another kind name it, for example input=parquet"
        )
    return JsonlReader(files, types=types, shards=shards)


class JsonlReader:
    """See ``pipeline.reader.Reader``; columns come in the order of their first appearance."""

    def __init__(self, files: Sequence[InputFile], *, types: dict[str, JsonType], shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.schema = pa.schema([pa.field(name, kind.arrow()) for name, kind in types.items()])
        self._paths = {file.name: file.path for file in files}
        self._converters = {name: kind.converter() for name, kind in types.items()}

    def read(self, shards: Iterable[Shard]) -> Iterator[ShardRows]:
        for name, group in itertools.groupby(shards, key=lambda shard: shard.file):
            first = next(group)
            with open_lines(self._paths[name], start=first.start) as stream:
                position = first.start
                for shard in itertools.chain([first], group):
                    while position < shard.start and (raw := stream.readline()):
                        position += len(raw)
                    lines = []
                    while position < shard.stop and (raw := stream.readline()):
                        position += len(raw)
                        lines.append(raw)
                    yield self._rows(shard, lines)

    def _rows(self, shard: Shard, lines: Sequence[bytes]) -> ShardRows:
        path = self._paths[shard.file]
        parsed = [_parse(raw, path=path, line=line) for line, raw in enumerate(lines, start=shard.first_line) if not _is_blank(raw)]
        try:
            table = pa.table([self._column(name, parsed) for name in self.schema.names], schema=self.schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"{path}: the file changed while it was read: {error}") from error
        if len(parsed) != shard.num_rows:
            raise ValueError(f"{path}: the file changed while it was read: it has other lines than before")
        return ShardRows(shard, table, self._records(shard, parsed))

    def _records(self, shard: Shard, parsed: Sequence[_Line]) -> Iterator[Record]:
        for index, line in enumerate(parsed):
            columns = {name: line.values.get(name) for name in self.schema.names}
            yield Record(row_key=f"{shard.file}:{shard.first_row + index}", index=index, columns=columns, error=line.error)

    def _column(self, name: str, parsed: Sequence[_Line]) -> pa.Array:
        convert = self._converters[name]
        values = [line.values.get(name) for line in parsed]
        return pa.array(values if convert is None else [convert(value) for value in values], type=self.schema.field(name).type)


@dataclass(frozen=True, slots=True)
class _Line:
    """A parsed line: its object, empty where it is none; ``error`` says why the row cannot be served."""

    values: dict[str, Any]
    error: RowError | None = None


def _scan_file(
    file: InputFile, *, types: dict[str, JsonType], rows_per_shard: int, columns: Sequence[str] | None, limit: float
) -> Iterator[Shard]:
    start = position = text_start(file.path)
    first_row = num_rows = 0
    first_line = line = 1
    digest = hashlib.sha256()

    def shard() -> Shard:
        return Shard(
            file=file.name,
            first_row=first_row,
            num_rows=num_rows,
            start=start,
            stop=position,
            first_line=first_line,
            digest=digest.hexdigest(),
        )

    with open_lines(file.path, start=start) as stream:
        for line, raw in enumerate(stream, start=1):
            blank = _is_blank(raw)
            if num_rows and not blank and (num_rows == rows_per_shard or position + len(raw) - start > SHARD_BYTES):
                yield shard()
                start, first_line, digest = position, line, hashlib.sha256()
                first_row, num_rows = first_row + num_rows, 0
            position += len(raw)
            digest.update(raw)
            if blank:
                continue
            if first_row == num_rows == 0 and raw.lstrip().startswith(b"["):
                raise ValueError(f"{file.path}: JSON array, want one object a line; for example: jq -c '.[]' {file.path.name}")
            num_rows += 1
            for name, value in _parse(raw, path=file.path, line=line).values.items():
                if columns is None or name in columns:
                    types.setdefault(name, JsonType()).add(value)
            if first_row + num_rows == limit:
                break
    if num_rows:
        yield shard()


def _first_line(files: Sequence[InputFile], shard: Shard) -> str:
    path = next(file.path for file in files if file.name == shard.file)
    with open_lines(path, start=shard.start) as stream:
        error = next(_parse(raw, path=path, line=line).error for line, raw in enumerate(stream, start=1) if not _is_blank(raw))
    return str(error) if error else f"{path}: an empty object"


def _is_blank(raw: bytes) -> bool:
    return not raw.strip(b" \t\r\n")


def _parse(raw: bytes, *, path: Path, line: int) -> _Line:
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        return _Line({}, RowError("bad_row", f"{path}, line {line}: no JSON: {error}"))
    if not isinstance(value, dict):
        return _Line({}, RowError("bad_row", f"{path}, line {line}: not an object but {type(value).__name__}; want one object a line"))
    if _is_deep(raw, value):
        return _Line({}, RowError("bad_row", f"{path}, line {line}: nested more than {_MAX_DEPTH} deep"))
    if _SURROGATE.search(raw) and (repaired := _repaired(value)) is not None:
        return _Line(repaired, RowError("bad_row", f"{path}, line {line}: half of a surrogate pair (\\ud800 to \\udfff) is no text"))
    return _Line(value)


def _is_deep(raw: bytes, value: dict[str, Any]) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= _MAX_DEPTH:
        return False
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inside = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [item for items in inside for item in items]
    return any(isinstance(item, (dict, list)) for item in level)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text} is out of range")
    return value


def _repaired(value: dict[str, Any]) -> dict[str, Any] | None:
    """``value`` with U+FFFD for each half of a surrogate pair; None where there is none."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        repaired: dict[str, Any] = json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
        return repaired
    return None

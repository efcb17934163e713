"""What lies beside the parts of an output folder: the records' names, and what their lines hold.

Knows neither who writes them nor when.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pipeline import durable
from pipeline.types import Shard

RUN, MANIFEST, SHARDS, ERRORS, RERUNS = "_run.json", "_manifest.jsonl", "_shards.jsonl", "errors.jsonl", "_reruns.jsonl"

# What a line of errors.jsonl tells of its row, beside the number of its part.
ERROR_KEYS = ("row_key", "row_id", "error_code", "error_message")

_Entry = TypeVar("_Entry", "FinishedPart", Shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedPart:
    """One line of ``_manifest.jsonl``.

    ``rows`` counts output rows. Of these ``errors`` failed, ``cut`` were ended by a length limit, and ``at_context`` met the
    end of the engine's context, as prompts or as answers.
    """

    part: int
    file: str
    rows: int
    errors: int
    cut: int
    at_context: int
    first_row_id: str
    last_row_id: str
    sha256: str
    bytes: int

    @classmethod
    def of(cls, part: int, path: Path, *, file: str, rows: Sequence[Mapping[str, Any]]) -> FinishedPart:
        """The line for the part that lies whole at ``path`` and will be ``file``; ``rows`` are all its output rows' values."""
        return cls(
            part=part,
            file=file,
            rows=len(rows),
            errors=sum(row["status"] == "error" for row in rows),
            cut=sum(row["finish_reason"] == "length" for row in rows),
            at_context=sum(row.get("stop_reason") == "context" or row.get("error_code") == "too_long" for row in rows),
            first_row_id=rows[0]["row_id"],
            last_row_id=rows[-1]["row_id"],
            sha256=durable.file_digest(path),
            bytes=path.stat().st_size,
        )

    def line(self) -> dict[str, Any]:
        """The line's values, with a checksum of them under ``crc32``."""
        values = asdict(self)
        return values | {"crc32": _checksum(values)}

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> FinishedPart | None:
        """The inverse of ``line``; None where a value is not as it was written."""
        values = {key: value for key, value in line.items() if key != "crc32"}
        return entry(cls, values) if line.get("crc32") == _checksum(values) else None


def error_line(part: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """The line of ``errors.jsonl`` for an output row that failed."""
    return {"part": part} | {key: row[key] for key in ERROR_KEYS}


def entry(kind: type[_Entry], values: Mapping[str, Any]) -> _Entry | None:
    """``values`` as a ``kind``; None where keys or types are others."""
    types = {field.name: {"int": int, "str": str}[str(field.type)] for field in fields(kind)}
    if values.keys() != types.keys() or any(type(values[name]) is not types[name] for name in types):
        return None
    return kind(**values)


def _checksum(values: Mapping[str, Any]) -> int:
    return zlib.crc32(durable.json_line(values).encode())

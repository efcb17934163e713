"""Where a folder's answers come from: the record ``_run.json``, and whether another run may add to them.

Knows nothing of shards and parts, and not what the fingerprint's keys mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline import durable

_KEYS = ("fingerprint", "columns")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the answers come from, as JSON values that the job fills in.

    ``config`` is the whole resolved configuration and ``versions`` the libraries', both for the record only.
    ``fingerprint`` holds what changes answers: another one does not go into the same folder.
    """

    config: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    versions: Mapping[str, str]


class RunRecord:
    """The content of ``_run.json``: the provenance, the types of the output's columns, and the engine's context in tokens."""

    def __init__(self, provenance: Provenance, *, columns: pa.Schema) -> None:
        types = {field.name: str(field.type) for field in columns}
        values = {"config": provenance.config, "fingerprint": provenance.fingerprint, "versions": provenance.versions, "columns": types}
        self.values: dict[str, Any] = json.loads(json.dumps(values))

    def refuse_other(self, path: Path) -> None:
        """Compare with the record at ``path``, under which answers were made already.

        Raises:
            ValueError: it is damaged, or tells of other settings; the message lists the differences.
        """
        before = read_record(path)
        differences = [
            *_differences(before["fingerprint"], self.values["fingerprint"], missing="not set"),
            *(f"column {line}" for line in _differences(before["columns"], self.values["columns"], missing="not there")),
        ]
        if differences:
            raise ValueError(
                f"output.path: {str(path.parent)!r} holds answers made with other settings:\n  "
                + "\n  ".join(differences)
                + "\nuse another output.path, or resume=force to start over"
            )

    def write(self, path: Path, *, max_model_len: int) -> None:
        durable.replace_text(path, json.dumps(self.values | {"max_model_len": max_model_len}, indent=2, ensure_ascii=False) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """The values of ``_run.json``.

    Raises:
        ValueError: it is missing or damaged.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        values = None
    if not isinstance(values, dict) or not all(isinstance(values.get(key), dict) for key in _KEYS):
        raise ValueError(f"{path}: missing or damaged, so the answers' settings are unknown; restore it, or use resume=force to start over")
    return values


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], *, missing: str, prefix: str = "") -> Iterator[str]:
    """One line for every leaf that is not equal: its dotted key, what it was, what it is; ``missing`` says that it is none."""
    for key in sorted({*before, *now}):
        was, is_now = before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            yield from _differences(was, is_now, missing=missing, prefix=f"{prefix}{key}.")
        elif was != is_now:
            told = [missing if value is None else json.dumps(value) for value in (was, is_now)]
            yield f"{prefix}{key}: was {told[0]}, is {told[1]}"

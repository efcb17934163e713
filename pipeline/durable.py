"""Files that survive a crash: whole or not there, and on the disk when the call returns.

Knows nothing of what the files hold.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (a rename, a new file) durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def rename(source: Path, target: Path) -> None:
    os.replace(source, target)
    sync_folder(target.parent)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` under a temporary name, then put it in place."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    sync_file(temporary)
    rename(temporary, path)


def append_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON object a line; a crash leaves at most the last line cut, and the next call takes that away."""
    _take_cut_line(path)
    is_new = not path.exists()
    with path.open("ab") as stream:
        stream.writelines(json_line(value).encode() for value in values)
        stream.flush()
        os.fsync(stream.fileno())
    if is_new:
        sync_folder(path.parent)


def _take_cut_line(path: Path) -> None:
    """What follows on a line that a crash or a full disk cut would be lost with it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        if stream.read() != b"\n":
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that ``append_lines`` wrote; a cut last line is left out, a missing file is empty.

    Raises:
        ValueError: another line is damaged; the message names it.
    """
    values, damaged = readable_lines(path)
    if damaged:
        raise ValueError(f"{path}, line {damaged[0]}: damaged; restore it, or use resume=force to start over")
    return values


def readable_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """As ``read_lines``, but a damaged line is left out too; the second list has their numbers, counted from 1."""
    values, damaged = [], []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            values.append(value)
        else:
            damaged.append(number)
    return values, damaged


def json_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"


def file_digest(path: Path) -> str:
    """The file's sha256 in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

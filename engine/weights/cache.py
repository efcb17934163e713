"""The user's cache folder: files that appear whole or not at all, and hashes that are not computed twice.

Knows nothing of models; what is kept is keyed by content, so two processes that write one entry write the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def cache_root() -> Path:
    """``$PAGEMILL_CACHE``, else ``$XDG_CACHE_HOME/pagemill``, else ``~/.cache/pagemill``."""
    if own := os.environ.get("PAGEMILL_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "pagemill"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that becomes ``path`` when the block ends well, and vanishes when it does not.

    Raises:
        ValueError: the folder cannot be written; the message says how to choose another.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temp_name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ValueError(f"cannot write the cache folder {path.parent}: {error}; set PAGEMILL_CACHE to one that can be written") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp_name, path)
    except BaseException:
        Path(temp_name).unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """The file's hash in hex; remembered for as long as its path, size and time of change stay the same."""
    stat = path.stat()
    identity = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    note = cache_root() / "hashes" / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.txt"
    if note.exists():
        return note.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with replacing(note) as out:
        out.write(digest.encode())
    return digest

"""A folder, or a file, that one process at a time may work in.

Knows nothing of what is done there; it says who has it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

LOCK = "_lock"


@contextmanager
def locked(folder: Path, *, key: str) -> Iterator[None]:
    """Make ``folder`` where it is missing and have it alone until the block ends.

    The lock is the kernel's: it goes with its process however that ends, so a dead run never blocks the next one.

    Raises:
        ValueError: another run has the folder (the message says which), or it cannot be written; the message names ``key``.
    """
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder / LOCK, at=folder, kind="folder", key=key)
    except OSError as error:
        raise ValueError(f"{key}: {str(folder)!r} cannot be written or locked: {error.strerror}") from error
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        lock.close()
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # the run was refused


@contextmanager
def locked_file(path: Path, *, key: str) -> Iterator[None]:
    """``locked`` for the file ``path``, which others may read; it is replaced as a whole, so the lock is a file of its own beside it."""
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        lock = _lock(lock_path, at=path, kind="file", key=key)
    except OSError as error:
        raise ValueError(f"{key}: {str(path)!r} cannot be written or locked: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):  # a disk that went away took it along
            lock_path.unlink()
        lock.close()


def _lock(path: Path, *, at: Path, kind: str, key: str) -> IO[str]:
    """The lock file ``path``, open and ours, for what lies ``at``; raises ValueError where another has it."""
    while True:
        stream = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read()
            stream.close()
            raise ValueError(f"{key}: {str(at)!r} is in use by {_told(owner)}; wait for it, or use another {kind}") from None
        if _lies_at(path, stream):
            break
        stream.close()  # its owner was just leaving and took the file along
    stream.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().astimezone().isoformat(" ", "seconds")}, stream)
    stream.flush()
    return stream


def _lies_at(path: Path, stream: IO[str]) -> bool:
    """Whether ``stream`` is the file that has the name ``path`` now; asked once, as its owner may take it away at any moment."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _told(owner: str) -> str:
    try:
        values = json.loads(owner)
        return f"process {values['pid']} on {values['host']}, which began at {values['since']}"
    except (ValueError, TypeError, KeyError):
        return "another run"

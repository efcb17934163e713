"""The output folder of one run, held by one process at a time.

Owns the lock and says who has it; what lies in the folder is the ledger's.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

_LOCK = "_lock"


@contextmanager
def held(path: str) -> Iterator[Path]:
    """The folder ``path``, made where it is missing, and nobody else's until the block ends.

    The lock is the kernel's: it goes with its process however that ends, so a dead run never blocks the next one.

    Raises:
        ValueError: another run holds the folder (the message says which), or it cannot be written.
    """
    folder = Path(path)
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except OSError as error:
        raise ValueError(f"output.path: {path!r} cannot be written or locked: {error.strerror}") from error
    try:
        yield folder
    finally:
        (folder / _LOCK).unlink(missing_ok=True)
        lock.close()
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # the run was refused


def _lock(folder: Path) -> IO[str]:
    path = folder / _LOCK
    while True:
        stream = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read()
            stream.close()
            raise ValueError(f"output.path: {str(folder)!r} is in use by {_told(owner)}; wait for it, or use another folder") from None
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            break
        stream.close()  # its owner was just leaving and took the file along
    stream.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now().astimezone().isoformat(" ", "seconds")}, stream)
    stream.flush()
    return stream


def _told(owner: str) -> str:
    try:
        values = json.loads(owner)
        return f"process {values['pid']} on {values['host']}, which began at {values['since']}"
    except (ValueError, TypeError, KeyError):
        return "another run"

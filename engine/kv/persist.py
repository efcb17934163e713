"""Blocks of keys and values that outlive an engine: a folder with one file a block, found by the tokens that the block stands for.

Owns the folder's files, their checks and their number; which blocks are worth keeping and what their bytes mean is told by others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

# Another one when the bytes of a block come to mean something else without a change in what names them.
_VERSION = 1
_DIGEST_BYTES = 32
_FILE = re.compile(r"[0-9a-f]{64}\.kv")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.kv\.[0-9a-f]{32}")
_ABANDONED_SECONDS = 3600.0

log = logging.getLogger(__name__)


class Shared(Protocol):
    """A published block that ``num_users`` requests had in common. ``is_saved``: its bytes came from a file."""

    block: int
    num_users: int
    is_saved: bool

    def prefix(self) -> bytes:
        """The int32 bytes of all tokens up to and including its own."""
        ...


class SavedBlocks:
    """The blocks of earlier engines with the same ``identity``, which is all that the bytes of a block depend on but its tokens.

    A file is named by the hash of identity and tokens, and begins with a hash of its name and its bytes: a torn file, a
    damaged one or one under another's name is found out when it is read, taken away, and its tokens are computed again. Files
    appear whole, so any number of processes may share the folder. It holds ``max_bytes`` at most, what was used last.
    """

    def __init__(self, folder: Path, *, identity: Mapping[str, object], block_bytes: int, max_bytes: int) -> None:
        """Raises ValueError where the folder cannot be written, or ``max_bytes`` holds no block."""
        if max_bytes < block_bytes + _DIGEST_BYTES:
            raise ValueError(f"kv_cache.persist_size: {max_bytes:,} bytes hold not one block, which takes {block_bytes + _DIGEST_BYTES:,}")
        self._folder = folder
        self._identity = json.dumps({**identity, "version": _VERSION}, sort_keys=True, default=str).encode()
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._warned = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = self._temporary(self._path(b""))
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(f"kv_cache.persist: the folder {folder} cannot be written: {error}") from error

    def read(self, prefix: bytes) -> bytes | None:
        """What the block at the end of ``prefix`` held; None where no whole file tells."""
        path = self._path(prefix)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{path} cannot be read: {error}")
            return None
        digest, block = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if len(block) == self._block_bytes and digest == _digest(path, block):
            return block
        self._warn(f"{path} is damaged and taken away; its tokens are computed again")
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def keep(self, blocks: Iterable[Shared], *, read_block: Callable[[int], bytes]) -> None:
        """Write those of ``blocks`` that were computed, the most used ones first, and remove what was not used for longest.

        ``blocks``: each after the block before it in its prompt, which has at least as many users. A file that is there although
        its block was computed stands behind one that is gone or damaged: it is written anew, so that a chain is one engine's
        work. What cannot be written is only warned of: nothing but time is lost.
        """
        most_used_first = sorted(blocks, key=lambda shared: -shared.num_users)  # of equal ones, the one that came first
        num_kept = self._max_bytes // (self._block_bytes + _DIGEST_BYTES)
        now = time.time_ns()
        try:
            for rank, shared in enumerate(most_used_first[:num_kept]):
                path = self._path(shared.prefix())
                # What was saved is not written again: if a step was broken off, its bytes may never have come to their place.
                if not shared.is_saved:
                    self._write(path, read_block(shared.block))
                with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                    os.utime(path, ns=(now, now - rank * 1000))
            self._remove_oldest()
        except (OSError, RuntimeError) as error:  # a full disk, or a device that is gone
            self._warn(f"not all shared blocks could be kept in {self._folder}: {error}")

    def _write(self, path: Path, block: bytes) -> None:
        assert len(block) == self._block_bytes, "all blocks are of one size"
        temporary = self._temporary(path)
        try:
            with temporary.open("xb") as file:
                file.write(_digest(path, block) + block)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _remove_oldest(self) -> None:
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if _FILE.fullmatch(entry.name):
                    found.append((entry.stat().st_mtime_ns, entry.stat().st_size, Path(entry.path)))
                elif _TEMPORARY.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > _ABANDONED_SECONDS:
                    Path(entry.path).unlink()
        num_bytes = 0
        for _, size, path in sorted(found, reverse=True):
            num_bytes += size
            if num_bytes > self._max_bytes:
                path.unlink(missing_ok=True)

    def _path(self, prefix: bytes) -> Path:
        digest = hashlib.sha256(len(self._identity).to_bytes(8, "little") + self._identity)
        digest.update(prefix)
        return self._folder / f"{digest.hexdigest()}.kv"

    def _temporary(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{uuid.uuid4().hex}")

    def _warn(self, text: str) -> None:
        """Once: a folder in which one file is damaged may have many."""
        if not self._warned:
            log.warning("kv_cache.persist: %s", text)
        self._warned = True


def _digest(path: Path, block: bytes) -> bytes:
    digest = hashlib.sha256(path.name.encode())
    digest.update(block)
    return digest.digest()

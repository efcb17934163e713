"""Which files an input path names, here or behind a URL, and how one is opened.

Knows places and names, not what is in a file.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

_BUFFER_BYTES = 1 << 20
# What a run writes into its output folder; see ``pipeline.ledger``.
_OUTPUT_NAME = re.compile(r"(_.*|part-\d{5,}\..+|errors(-\d{5,})?\..+|(metrics|report)\.\w+|README\.md)$")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of the input.

    ``name`` is relative to ``input.path``'s folder, with slashes, and begins its row keys; ``path`` is what
    ``filesystem`` calls it. As text it is the path, or the URL where it is not on this machine.
    """

    filesystem: fsspec.AbstractFileSystem
    path: str
    name: str

    @property
    def is_local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    def open(self) -> BinaryIO:
        """Its bytes, buffered; raises OSError where it cannot be opened."""
        if self.is_local:
            return open(self.path, "rb", buffering=_BUFFER_BYTES)
        return io.BufferedReader(_RemoteStream(self.filesystem, self.path), _BUFFER_BYTES)

    def __str__(self) -> str:
        return self.path if self.is_local else str(self.filesystem.unstrip_protocol(self.path))


class _RemoteStream(io.RawIOBase):
    """A file behind a URL. What its store's library raises comes out as OSError, which is what readers look for."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str) -> None:
        self._file: Any = None
        self._file = self._asked(filesystem.open, path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._asked(self._file.seek, offset, whence))

    def readinto(self, buffer: Any) -> int:
        data: bytes = self._asked(self._file.read, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    @staticmethod
    def _asked(ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def find_files(path: str, *, suffixes: Sequence[str], output_path: str | None = None) -> list[InputFile]:
    """The files that ``path`` names, sorted by name; ``path`` is a local path or any URL that fsspec knows.

    A file is taken whatever its ending; a folder gives every file below it with one of ``suffixes``, but none whose
    name or folder starts with ``_`` or ``.``; a glob gives the files that match, as in a shell. Links to folders are not followed.
    What an earlier run wrote into ``output_path`` is no input of the next one.

    Raises:
        ValueError: there is no such file, its place or a folder below it cannot be listed, a link leads nowhere, or a file that
            no run wrote lies in ``output_path``; the message names the key.
    """
    filesystem, place = _place(path)
    try:
        filesystem.invalidate_cache()  # what another run of this process saw may have changed
        if isinstance(filesystem, LocalFileSystem):
            _ask_for(place)
        single = filesystem.isfile(place)
        files = [InputFile(filesystem, place, place.rsplit("/", 1)[-1])] if single else _found(filesystem, place, suffixes=suffixes)
    except Exception as error:  # a store's library raises what it likes
        raise ValueError(f"input.path: {path!r} cannot be listed: {type(error).__name__}: {error}") from error
    for file in files:
        if not _is_text(file.path):
            raise ValueError(f"input.path: the name of {file.path!r} is no UTF-8, so nothing could be said of its rows; rename it")
    if not files:
        endings = f" that ends in {', '.join(suffixes)}" if filesystem.isdir(place) else ""
        raise ValueError(f"input.path: {path!r} names no file{endings}")
    if output_path is not None and not single:
        files = list(_without_output(files, output_path, path=path))
    return sorted(files, key=lambda file: file.name)


def _is_text(name: str) -> bool:
    """Whether all of ``name`` was UTF-8: what was none is half of a surrogate pair in it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _place(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    if "://" not in path:
        return LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    try:
        filesystem, place = url_to_fs(path)
    except ImportError as error:  # fsspec's message names the package
        raise ValueError(f"input.path: {path!r} needs a package that is not installed: {error}") from error
    except ValueError as error:
        raise ValueError(f"input.path: {path!r}: {error}") from error
    return filesystem, place


def _ask_for(place: str) -> None:
    """Raises PermissionError where a local place may be there and is out of reach: to fsspec that is no file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.stat(place)


def _found(filesystem: fsspec.AbstractFileSystem, place: str, *, suffixes: Sequence[str]) -> list[InputFile]:
    skipped: tuple[str, ...]
    endings: tuple[str, ...]
    if filesystem.isdir(place):
        root, skipped, endings = place.rstrip("/"), ("_", "."), tuple(suffixes)
        _list_all(filesystem, root, pattern=("**",), skipped=skipped)
        entries = filesystem.find(place, detail=True)
    elif glob.has_magic(place):
        root, skipped, endings = "/".join(_without_magic(place.split("/"))), (".",), ("",)
        if "/." in place[len(root) :]:  # as in a shell, a dot matches where it is written only
            skipped = ()
        _list_all(filesystem, root, pattern=place[len(root) :].strip("/").split("/"), skipped=skipped)
        entries = filesystem.glob(place, detail=True)
    else:
        return []
    files = []
    for each, entry in entries.items():
        name = each[len(root) :].lstrip("/")
        if not name.endswith(endings) or any(part.startswith(skipped) for part in name.split("/")):
            continue
        if entry["type"] == "file" or (entry["type"] != "directory" and filesystem.isfile(each)):
            files.append(InputFile(filesystem, each, name))
        elif entry.get("islink") and not filesystem.exists(each):
            raise FileNotFoundError(f"{each} is a link to a file that is not there")
    return files


def _list_all(filesystem: fsspec.AbstractFileSystem, root: str, *, pattern: Sequence[str], skipped: tuple[str, ...]) -> None:
    """Raises OSError where a folder on this machine that ``pattern`` goes through cannot be listed: fsspec would pass over its rows."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # it may go while we look
            raise error

    if not isinstance(filesystem, LocalFileSystem):
        return
    for folder, below, _ in os.walk(root or "/", onerror=refuse):
        level = len([part for part in folder[len(root) :].split("/") if part])
        if "**" in pattern[: level + 1]:
            below[:] = [name for name in below if not name.startswith(skipped)]
        else:
            below[:] = [name for name in below if level + 1 < len(pattern) and fnmatch.fnmatchcase(name, pattern[level])]


def _without_magic(parts: Sequence[str]) -> Iterator[str]:
    """The leading folders of a glob that are plain names."""
    for part in parts[:-1]:
        if glob.has_magic(part):
            return
        yield part


def _without_output(files: Sequence[InputFile], output_path: str, *, path: str) -> Iterator[InputFile]:
    filesystem = files[0].filesystem
    folder = _inside(filesystem, output_path)
    kept = False
    for file in files:
        place = _real(filesystem, file.path)
        if folder is None or not place.startswith(folder):
            kept = True
            yield file
        elif not _OUTPUT_NAME.match(place.removeprefix(folder)):
            raise ValueError(
                f"output.path: {output_path!r} holds {file}, which input.path={path!r} names, so input and output would mix; "
                "choose another folder for the output"
            )
    if not kept:
        raise ValueError(f"input.path: {path!r} names only files that a run wrote into output.path")


def _inside(filesystem: fsspec.AbstractFileSystem, folder: str) -> str | None:
    """How the paths in ``folder`` begin on ``filesystem``; None where it lies elsewhere, or cannot be told (then it is no output)."""
    try:
        other, place = _place(folder)
    except ValueError:
        return None
    return _real(filesystem, place).rstrip("/") + "/" if type(other) is type(filesystem) else None


def _real(filesystem: fsspec.AbstractFileSystem, place: str) -> str:
    return os.path.realpath(place) if isinstance(filesystem, LocalFileSystem) else place

"""The output folder of one run, on this machine or behind a URL: where its files are made and how they get there.

Knows names, sizes and hashes; what the files hold is the ledger's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec

from engine import cache_root
from pipeline import durable
from pipeline.lock import LOCK, locked
from pipeline.types import RunError


class OutputFolder:
    """A folder on this machine.

    Attributes:
        path: where files are made.
        name: what the user calls the folder.
    """

    def __init__(self, path: Path, *, name: str) -> None:
        self.path = path
        self.name = name

    def names(self) -> set[str]:
        """The files in the folder."""
        return {path.name for path in self.path.iterdir() if path.name != LOCK}

    def holds(self, name: str, *, num_bytes: int, sha256: str) -> bool:
        """Whether the file is there and whole."""
        path = self.path / name
        return path.is_file() and path.stat().st_size == num_bytes and durable.file_digest(path) == sha256

    def rename(self, old: str, new: str) -> None:
        durable.rename(self.path / old, self.path / new)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def waiting(self, names: Sequence[str]) -> list[str]:
        """Which of the parts ``names`` have yet to be delivered."""
        return []

    def fetch(self, records: Sequence[str], *, waiting: bool) -> None:
        """Have the folder's records at ``path``; ``waiting``: parts that have yet to be delivered are there."""

    def deliver(self, names: Sequence[str], *, parts: Sequence[str] = ()) -> None:
        """What was made at ``path`` is to be in the folder, the records ``names`` before ``parts``: here it is."""


class RemoteFolder(OutputFolder):
    """A folder that fsspec reaches (s3, gs, abfs, sftp, ...); ``path`` is the scratch folder here.

    A file is uploaded under a temporary name and then moved, so it is whole or not there. The records that tell of a part are
    uploaded before it, so a part that is there always has its line, whichever machine goes on. It stays in the scratch folder
    until then, so whatever part lies there is to go first the next time. Two machines must not work on one URL at a time: the
    lock is this machine's.
    """

    def __init__(self, path: Path, *, url: str) -> None:
        """Raises ValueError where the URL cannot be reached."""
        super().__init__(path, name=url)
        self._digests: dict[str, str] = {}  # of the records that are there as they are here
        self._copied: list[str] = []  # temporary names whose move stopped between the copy and the removal
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
            self._sizes = self._listed()
        except Exception as error:  # an ImportError tells the package to install
            raise ValueError(f"output.path: {url} cannot be reached: {error}") from error

    def names(self) -> set[str]:
        return super().names() | self._sizes.keys()

    def holds(self, name: str, *, num_bytes: int, sha256: str) -> bool:
        """A file that is uploaded counts by its size: to hash it would be to download it."""
        if (self.path / name).exists():
            return super().holds(name, num_bytes=num_bytes, sha256=sha256)
        return self._sizes.get(name) == num_bytes

    def rename(self, old: str, new: str) -> None:
        if (self.path / old).exists():
            super().rename(old, new)
        if old in self._sizes:
            with self._reaching():
                self._files.mv(self._at(old), self._at(new))
            self._sizes[new] = self._sizes.pop(old)

    def remove(self, name: str) -> None:
        super().remove(name)
        if name in self._sizes:
            with self._reaching():
                self._files.rm_file(self._at(name))
            del self._sizes[name]
            self._digests.pop(name, None)

    def waiting(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if (self.path / name).exists()]

    def fetch(self, records: Sequence[str], *, waiting: bool) -> None:
        """Bring the records that are there, unless parts here wait: then those here are newer.

        Raises:
            ValueError: parts wait, and another machine has gone on since.
            RunError: a record cannot be brought.
        """
        for name in records:
            if name in self._sizes and not waiting:
                with self._reaching():
                    self._files.get_file(self._at(name), str(self.path / name))
                self._digests[name] = durable.file_digest(self.path / name)
            elif name in self._sizes and name.endswith(".jsonl") and not self._lines_there(name) <= self._lines_here(name):
                raise ValueError(
                    f"output.path: another machine went on at {self.name} while parts waited in {self.path} for their upload; "
                    "take that folder away to go on from what is uploaded"
                )

    def deliver(self, names: Sequence[str], *, parts: Sequence[str] = ()) -> None:
        """Upload, and let go of the parts here; a record that is there already stays as it is.

        Raises:
            RunError: it failed; what was not uploaded stays here.
        """
        records = {name: durable.file_digest(self.path / name) for name in names if (self.path / name).exists()}
        changed = [name for name, digest in records.items() if self._digests.get(name) != digest]
        with self._reaching():
            if self._root.startswith("/"):  # else it begins with a bucket, which has no folders and is not ours to make
                self._files.makedirs(self._root, exist_ok=True)
            while self._copied:
                self._files.rm_file(self._at(self._copied.pop()))
            for name in (*changed, *parts):
                self._files.put_file(str(self.path / name), self._at(f"{name}.tmp"))
                self._files.mv(self._at(f"{name}.tmp"), self._at(name))
                self._sizes[name] = (self.path / name).stat().st_size
        self._digests |= records
        for name in parts:
            (self.path / name).unlink()

    def _listed(self) -> dict[str, int]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError as error:
            if type(error.__cause__).__name__ == "NoSuchBucket":  # botocore's; else nothing is there yet
                raise
            return {}
        sizes = {info["name"].rstrip("/").rpartition("/")[2]: info["size"] for info in found if info["type"] == "file"}
        self._copied = [name for name in sizes if name.endswith(".tmp") and name.removesuffix(".tmp") in sizes]
        return {name: size for name, size in sizes.items() if not name.endswith(".tmp")}

    def _lines_there(self, name: str) -> set[bytes]:
        with self._reaching():
            return set(self._files.cat_file(self._at(name)).splitlines())

    def _lines_here(self, name: str) -> set[bytes]:
        path = self.path / name
        return set(path.read_bytes().splitlines()) if path.exists() else set()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each file system has its own
            raise RunError(f"output.path: {self.name} cannot be reached: {error}; what was not uploaded is in {self.path}") from error

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def held(path: str, *, scratch: str | None = None) -> Iterator[OutputFolder]:
    """The folder ``path``, nobody else's until the block ends.

    A URL is worked on in ``scratch``, a folder on this machine (None: in the user's cache), where the lock lies as well.

    Raises:
        ValueError: another run holds the folder (the message says which), or it cannot be written or reached.
    """
    if "://" not in path:
        with locked(Path(path), key="output.path"):
            yield OutputFolder(Path(path), name=path)
    else:
        local = Path(scratch).expanduser() if scratch is not None else _scratch(path)
        with locked(local, key="output.scratch"):
            yield RemoteFolder(local, url=path)


@contextmanager
def at_hand(path: str) -> Iterator[Path]:
    """The folder ``path`` to read in: itself where it is on this machine, else a copy that is gone when the block ends.

    Raises:
        ValueError: the URL cannot be reached, or there is no room for the copy.
    """
    if "://" not in path:
        yield Path(path)
        return
    copies = cache_root() / "copies"
    copies.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=copies) as copy:
        try:
            files, root = fsspec.core.url_to_fs(path)
            files.invalidate_cache()
            files.get(root.rstrip("/") + "/", copy, recursive=True)
        except Exception as error:
            raise ValueError(f"{path} cannot be reached or copied: {error}") from error
        yield Path(copy)


def _scratch(url: str) -> Path:
    label = re.sub(r"\W+", "_", url.rstrip("/").rpartition("/")[2])[:40]
    return cache_root() / "outputs" / f"{label}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"

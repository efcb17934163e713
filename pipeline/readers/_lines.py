"""Lines of a text file as bytes, plain or compressed: split at byte 0x0A and nowhere else.

Knows compression and encodings, not what a line means.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

_CHUNK = 1 << 20
_FOREIGN = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@contextmanager
def open_lines(path: Path, *, start: int = 0) -> Iterator[BinaryIO]:
    """Open ``path`` at byte ``start`` of its decompressed text; iterate or ``readline`` for lines with their end.

    gzip, zstd and bzip2 are told by content, so the ending does not matter.

    Raises:
        ValueError: while it is open, the file is missing, damaged or cut; the message names it.
    """
    try:
        with path.open("rb") as raw, _decompressed(raw) as stream:
            if stream.seekable():
                stream.seek(start)
            else:
                for size in _sizes(start):
                    stream.read(size)
            yield stream
    except EOFError as error:
        raise ValueError(f"{path}: the compressed file is cut short; write it again, or cut it back to whole rows") from error
    except (OSError, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def text_start(path: Path) -> int:
    """Where the text begins: 3 after a UTF-8 byte order mark, else 0.

    Raises:
        ValueError: the file is UTF-16 or UTF-32.
    """
    with open_lines(path) as stream:
        head = stream.read(4)
    for mark, encoding in _FOREIGN.items():
        if head.startswith(mark):
            raise ValueError(f"{path}: the file is {encoding}; convert it to UTF-8, for example: iconv -f {encoding} -t UTF-8")
    if b"\x00" in head[:2]:
        raise ValueError(f"{path}: the file looks like UTF-16 without a byte order mark; convert it to UTF-8")
    return 3 if head.startswith(codecs.BOM_UTF8) else 0


def _decompressed(raw: BinaryIO) -> BinaryIO:
    head = raw.read(4)
    raw.seek(0)
    if head.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if head == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(_ZstdFile(raw), _CHUNK)
    if head.startswith(b"BZh"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    return raw


def _sizes(total: int) -> Iterator[int]:
    """``total`` bytes in chunks."""
    while total > 0:
        yield min(total, _CHUNK)
        total -= _CHUNK


class _ZstdFile(io.RawIOBase):
    """Decompressed zstd frames one after the other; unlike the library's own reader, a cut frame raises EOFError."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = zstandard.ZstdDecompressor().decompressobj()
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        target = memoryview(buffer)  # type: ignore[arg-type]
        while not self._output:
            data = self._input or self._raw.read(_CHUNK)
            self._input = b""
            if not data:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._output = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        size = min(len(target), len(self._output))
        target[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

"""Lines of a text file as bytes, plain or compressed: split at byte 0x0A and nowhere else.

Knows compression, encodings and where it is in the text, not what a line means.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import zstandard

from pipeline.input_files import InputFile

# What a text file's name may end in behind its own ending; how it is packed is told by content.
PACKED = ("", ".gz", ".zst", ".bz2")

_CHUNK = 1 << 20
_FOREIGN = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class Lines:
    """The lines of one open text, each with its end.

    Attributes:
        position: bytes of the decompressed text before the next line.
        number: the next line's number, counted from 1.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.position = 0
        self.number = 1
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        for line in self._stream:
            self.position += len(line)
            self.number += 1
            yield line

    def read(self) -> bytes:
        """All that is left, as one."""
        data = self._stream.read()
        self.position += len(data)
        return data

    def skip_to(self, position: int, *, number: int) -> None:
        """Go forward to the line ``number``, which begins at byte ``position``."""
        if self._stream.seekable():
            self._stream.seek(position)
        else:
            while self.position < position and (data := self._stream.read(min(_CHUNK, position - self.position))):
                self.position += len(data)
        self.position, self.number = position, number


@contextmanager
def open_lines(file: InputFile) -> Iterator[Lines]:
    """Open ``file`` at the beginning of its text, behind a byte order mark if there is one.

    gzip, zstd and bzip2 are told by content, so the ending does not matter.

    Raises:
        ValueError: while it is open, the file is missing, damaged or cut, or it is UTF-16 or UTF-32; the message names it.
    """
    try:
        start = _text_start(file)
        with file.open() as raw, _decompressed(raw) as stream:
            lines = Lines(stream)
            lines.skip_to(start, number=1)
            yield lines
    except EOFError as error:
        raise ValueError(f"{file}: the compressed file is cut short; write it again, or cut it back to whole rows") from error
    except (OSError, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error


def _text_start(file: InputFile) -> int:
    """Where the text begins: 3 after a UTF-8 byte order mark, else 0."""
    with file.open() as raw, _decompressed(raw) as stream:
        head = stream.read(4)
    for mark, encoding in _FOREIGN.items():
        if head.startswith(mark):
            raise ValueError(f"{file}: the file is {encoding}; convert it to UTF-8, for example: iconv -f {encoding} -t UTF-8")
    if b"\x00" in head[:2]:
        raise ValueError(f"{file}: the file looks like UTF-16 without a byte order mark; convert it to UTF-8")
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

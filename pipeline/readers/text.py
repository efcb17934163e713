"""Text files, one row each: plain or compressed UTF-8, such as Markdown; for use with ``prompt.template``.

The columns are ``text``, the whole file without a leading byte order mark, and ``file``, its name relative to
``input.path``'s folder. A file that is no UTF-8 is an error row, with U+FFFD in place of what is none.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.input_files import InputFile
from pipeline.reader import Reader, Scan
from pipeline.readers import _text_rows
from pipeline.readers._lines import PACKED, Lines
from pipeline.readers._text_rows import TextRow
from pipeline.types import RowError

SUFFIXES = tuple(stem + packed for stem in (".txt", ".md", ".markdown", ".rst") for packed in PACKED)


def scan(asked: Scan) -> Reader:
    """See ``pipeline.reader.Format``."""
    return _text_rows.scan(asked, files=asked.files(SUFFIXES), parse=_whole)


def _whole(lines: Lines, file: InputFile) -> Iterator[TextRow]:
    start = lines.position
    data = lines.read()
    text = data.decode("utf-8", "replace")
    error = None if text.encode() == data else RowError("bad_row", f"{file}: the text is no UTF-8")
    yield TextRow(start, lines.position, 1, data, {"text": text, "file": file.name}, error)

"""CSV with a header line, and TSV (``.tsv``), plain or compressed: UTF-8, quoted as in RFC 4180.

A CSV file has no types, so every column is text and stays as it is written: ``007``, ``1.10`` and ``2024-01-01`` too. An
empty field is null. A quoted field may hold line ends and quotes ("" for one). Columns are known by the header's names,
so files may order them differently. Blank lines are skipped. A row with more or fewer fields than the header, or with
text that is no UTF-8, is an error row.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator

from pipeline.input_files import InputFile
from pipeline.reader import SHARD_BYTES, Reader, Scan
from pipeline.readers import _text_rows
from pipeline.readers._lines import PACKED, Lines
from pipeline.readers._text_rows import TextRow
from pipeline.types import RowError

_TSV = tuple(f".tsv{packed}" for packed in PACKED)
SUFFIXES = tuple(f".csv{packed}" for packed in PACKED) + _TSV

_ESCAPED = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of bytes that are no UTF-8


def scan(asked: Scan) -> Reader:
    """See ``pipeline.reader.Format``."""
    csv.field_size_limit(sys.maxsize)  # the whole process's, and 128 KiB by default, which prompts exceed
    return _text_rows.scan(asked, files=asked.files(SUFFIXES), parse=_CsvRows())


class _CsvRows:
    """A ``RowParser`` that remembers every file's header."""

    def __init__(self) -> None:
        self._headers: dict[str, list[str]] = {}

    def __call__(self, lines: Lines, file: InputFile) -> Iterator[TextRow]:
        source = _RowLines(lines, file)
        rows = csv.reader(source, delimiter="\t" if file.name.endswith(_TSV) else ",", strict=True)
        while (fields := _next(rows)) is not None:
            text, start, number = source.take()
            if not fields:
                continue
            if file.name not in self._headers:
                self._headers[file.name] = _header(fields, where=f"{file}, line {number}")
                continue
            values, reason = _values(fields, header=self._headers[file.name])
            error = None if reason is None else RowError("bad_row", f"{file}, line {number}: {reason}")
            yield TextRow(start, start + len(text), number, text, values, error)


class _RowLines:
    """Lines as text, one by one for the parser, which takes as many as a row has; ``take`` tells what the row was."""

    def __init__(self, lines: Lines, file: InputFile) -> None:
        self._lines = lines
        self._file = file
        self._taken: list[bytes] = []

    def __iter__(self) -> Iterator[str]:
        num_bytes = 0
        for raw in self._lines:
            num_bytes = num_bytes + len(raw) if self._taken else len(raw)
            self._taken.append(raw)
            if num_bytes > SHARD_BYTES and len(self._taken) > 1:
                number = self._lines.number - len(self._taken)
                raise ValueError(f"{self._file}, line {number}: a quote that is open here is not closed within {SHARD_BYTES >> 20} MiB")
            yield raw.decode("utf-8", "surrogateescape")

    def take(self) -> tuple[bytes, int, int]:
        """The row's text without its line end, where it begins, and its first line's number."""
        text = b"".join(self._taken)
        start, number = self._lines.position - len(text), self._lines.number - len(self._taken)
        self._taken.clear()
        return text.rstrip(b"\r\n"), start, number


def _next(rows: Iterator[list[str]]) -> list[str] | str | None:
    """The next row's fields, what is wrong with it, or None at the end."""
    try:
        return next(rows, None)
    except csv.Error as error:
        return str(error)


def _header(fields: list[str] | str, *, where: str) -> list[str]:
    names, reason = _values(fields, header=list(fields))
    if reason is not None:
        raise ValueError(f"{where}: the header cannot be read: {reason}")
    if len(names) < len(fields):
        twice = next(name for name in fields if fields.count(name) > 1)
        raise ValueError(f"{where}: the column {twice!r} is there twice; give every column a name of its own")
    if len(fields) == 1 and (";" in fields[0] or "\t" in fields[0]):
        raise ValueError(f"{where}: the header is one column, {fields[0]!r}; write the file with commas, or with tabs and the ending .tsv")
    if any("\0" in name for name in names):
        raise ValueError(f"{where}: a column's name has a NUL, which other programs cut there; give it another name")
    return list(names)


def _values(fields: list[str] | str, *, header: list[str]) -> tuple[dict[str, str | None], str | None]:
    """The row's columns, and what is wrong with it; empty where something is."""
    if isinstance(fields, str):
        return {}, fields
    if len(fields) != len(header):
        return {}, f"{len(fields)} fields, but the header has {len(header)}"
    if any(not field.isascii() and _ESCAPED.search(field) for field in fields):
        return {}, "the text is no UTF-8"
    return {name: field or None for name, field in zip(header, fields, strict=True)}, None

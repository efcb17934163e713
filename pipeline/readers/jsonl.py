"""JSON Lines, plain or compressed (gzip, zstd, bzip2): one UTF-8 object a line, read by one strict parser.

Blank lines are skipped, CRLF and a leading byte order mark are taken off, a repeated key's last value wins, NaN and
Infinity are refused, strings are never taken for dates. A line that is no such object, is nested over 128 deep or has a
NUL in a key is an error row with all columns null; half of a surrogate pair makes an error row too, with U+FFFD in its
place. Types: see ``_json_types``.
"""

from __future__ import annotations

import itertools

from pipeline.reader import Reader, Scan
from pipeline.readers import _text_rows
from pipeline.readers._json_rows import JsonRows
from pipeline.readers._lines import PACKED

SUFFIXES = tuple(stem + packed for stem in (".jsonl", ".ndjson", ".json") for packed in PACKED)


def scan(asked: Scan) -> Reader:
    """Parse every line once; see ``pipeline.reader.Format``."""
    reader = _text_rows.scan(asked, files=asked.files(SUFFIXES), parse=JsonRows())
    if reader.shards and not reader.schema.names and asked.columns is None:
        first = next(itertools.chain.from_iterable(rows.records for rows in reader.read(reader.shards[:1])))
        raise ValueError(
            f"input.path: no line is an object with keys; the first is in {first.error or f'{first.row_key}, an empty object'}; "
            "for files of another kind name it, for example input=parquet"
        )
    return reader

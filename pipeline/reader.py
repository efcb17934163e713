"""What a reader is, and which files an input path names.

Knows no file format: a format is one module in ``pipeline/readers``, found by its file name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Where rows come from.

    ``format`` is a module of ``pipeline/readers``; ``path`` a file, a folder or a glob. ``columns`` reads only those
    (default: all). ``id_column`` labels the rows (default: ``id``, else ``custom_id``, else the row key).
    """

    format: str
    path: str
    id_column: str | None = None
    columns: tuple[str, ...] | None = None
    rows_per_shard: int = 1024

    def __post_init__(self) -> None:
        if self.rows_per_shard < 1:
            raise ValueError(f"input.rows_per_shard: {self.rows_per_shard} must be 1 or more")

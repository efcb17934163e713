"""What is refused before a row is read, whatever the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.reader import InputOptions, Reader, open_reader


def opened(path: Path, **options: Any) -> Reader:
    limit = options.pop("limit", None)
    return open_reader(InputOptions(**{"format": "jsonl", "path": str(path), **options}), prompt_columns=["prompt"], limit=limit)


def test_bad_settings_are_refused_with_their_keys(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.touch()
    with pytest.raises(ValueError, match=r"input: there is no 'xls'; choose one of .*jsonl.*, parquet"):
        opened(path, format="xls")
    with pytest.raises(ValueError, match=r"input\.rows_per_shard"):
        opened(path, rows_per_shard=0)
    with pytest.raises(ValueError, match="limit: 0"):
        opened(path, limit=0)
    with pytest.raises(ValueError, match=r"input\.path: .* has no rows"):
        opened(path)


def test_a_column_that_is_not_there_is_named_beside_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1, "prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"input\.id_column: the input has no column 'key'; it has 'id', 'prompt'"):
        opened(path, id_column="key")
    with pytest.raises(ValueError, match=r"input\.columns: the input has no column 'nope'; it has 'id', 'prompt'"):
        opened(path, columns=("nope",))
    with pytest.raises(ValueError, match=r"input\.id_column: input\.columns leaves out 'id'"):
        opened(path, columns=("prompt",), id_column="id")

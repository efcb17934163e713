"""Which files an input path names, and what they are called in row keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.reader import InputOptions, find_files, open_reader


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.jsonl", "_SUCCESS", ".hidden.jsonl", "_tmp/x.jsonl", "notes.txt", "sub/[x].jsonl"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "in"


def names(path: Path | str) -> list[str]:
    files = find_files(str(path), suffixes=(".jsonl", ".jsonl.gz"))
    assert all(file.path.is_file() for file in files)
    return [file.name for file in files]


def test_files_folders_and_globs(tree: Path) -> None:
    assert names(tree / "notes.txt") == ["notes.txt"]
    assert names(tree) == ["a.jsonl.gz", "b.jsonl", "sub/[x].jsonl", "sub/c.jsonl"]
    assert names(tree / "*.jsonl") == ["b.jsonl"]
    assert names(tree / "*" / "c.jsonl") == ["sub/c.jsonl"]
    assert names(tree / "**" / "[bc].jsonl") == ["b.jsonl", "sub/c.jsonl"]
    assert names(tree / "**" / "**" / "[bc].jsonl") == ["b.jsonl", "sub/c.jsonl"]
    assert names(tree / "sub" / "[x].jsonl") == ["[x].jsonl"], "a file that is there is no glob"


def test_relative_paths_and_globs(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert names("b.jsonl") == ["b.jsonl"]
    assert names("*.jsonl") == ["b.jsonl"]
    assert names("./sub") == ["[x].jsonl", "c.jsonl"]


@pytest.mark.parametrize("path", ["missing.jsonl", "missing/*.jsonl", "*.parquet", "empty"])
def test_a_path_that_names_nothing_is_refused(tree: Path, path: str) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(ValueError, match=r"input\.path: "):
        names(tree / path)


def test_bad_settings_are_refused_with_their_keys(tree: Path) -> None:
    def opened(path: Path, **options: object) -> None:
        limit = options.pop("limit", None)
        open_reader(InputOptions(**{"format": "jsonl", "path": str(path), **options}), prompt_columns=["prompt"], limit=limit)

    with pytest.raises(ValueError, match=r"input: there is no 'xls'; choose one of jsonl, parquet"):
        opened(tree, format="xls")
    with pytest.raises(ValueError, match=r"input\.rows_per_shard"):
        opened(tree, rows_per_shard=0)
    with pytest.raises(ValueError, match="limit: 0"):
        opened(tree, limit=0)
    with pytest.raises(ValueError, match=r"input\.path: .* has no rows"):
        opened(tree)
    (tree / "b.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"input\.id_column: the input has no column 'key'"):
        opened(tree, id_column="key")

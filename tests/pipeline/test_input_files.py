"""Which files an input path names, here and behind URLs, and what they are called in row keys."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from pipeline.input_files import find_files
from pipeline.reader import InputOptions, open_reader


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl.gz", "sub/c.jsonl", "_SUCCESS", ".hidden.jsonl", "_tmp/x.jsonl", "notes.txt", "sub/[x].jsonl"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "in"


def names(path: Path | str, **options: str) -> list[str]:
    files = find_files(str(path), suffixes=(".jsonl", ".jsonl.gz"), **options)
    for file in files:
        with file.open() as stream:
            assert stream.read().decode().endswith(file.name), "it is the file of that name"
    return [file.name for file in files]


def test_a_name_that_is_no_text_is_refused_and_shown(tree: Path) -> None:
    path = os.fsencode(tree / "odd-") + b"\xff.jsonl"
    with open(path, "w") as stream:
        stream.write("odd")
    for given in (tree, tree / "*.jsonl", os.fsdecode(path)):
        with pytest.raises(ValueError, match=r"input\.path: the name of '.*odd-\\udcff\.jsonl' is no UTF-8.*rename it") as refused:
            names(given)
        str(refused.value).encode()
    assert names(tree / "b*") == ["b.jsonl"]


def test_files_folders_and_globs(tree: Path) -> None:
    assert names(tree / "notes.txt") == ["notes.txt"]
    assert names(tree) == ["a.jsonl.gz", "b.jsonl", "sub/[x].jsonl", "sub/c.jsonl"]
    assert names(f"{tree}/") == names(tree)
    assert names(tree / "*.jsonl") == ["b.jsonl"]
    assert names(tree / ".*.jsonl") == [".hidden.jsonl"]
    assert names(tree / "*" / "c.jsonl") == ["sub/c.jsonl"]
    assert names(tree / "**" / "[bc].jsonl") == ["b.jsonl", "sub/c.jsonl"]
    assert names(tree / "**" / "**" / "[bc].jsonl") == ["b.jsonl", "sub/c.jsonl"]
    assert names(tree / "sub" / "[x].jsonl") == ["[x].jsonl"], "a file that is there is no glob"


def test_relative_paths_and_globs(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    assert names("b.jsonl") == ["b.jsonl"]
    assert names("*.jsonl") == ["b.jsonl"]
    assert names("./sub") == ["[x].jsonl", "c.jsonl"]


def test_links_to_files_count_and_links_to_folders_do_not(tree: Path) -> None:
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "sub" / "link.jsonl").symlink_to(tree / "b.jsonl")
    found = find_files(str(tree / "sub"), suffixes=(".jsonl",))
    assert [file.name for file in found] == ["[x].jsonl", "c.jsonl", "link.jsonl"]


@pytest.mark.parametrize("path", ["missing.jsonl", "missing/*.jsonl", "*.parquet", "empty"])
def test_a_path_that_names_nothing_is_refused(tree: Path, path: str) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(ValueError, match=r"input\.path: "):
        names(tree / path)


@pytest.mark.parametrize("scheme", ["memory://", "file://"])
def test_urls_name_the_same_files_as_paths(tree: Path, scheme: str) -> None:
    root = f"{scheme}{tree}" if scheme == "file://" else f"memory://{tree.parent.name}/in"
    filesystem, place = fsspec.url_to_fs(root)
    if scheme == "memory://":
        for path in tree.rglob("*"):
            if path.is_file():
                filesystem.pipe(f"{place}/{path.relative_to(tree).as_posix()}", path.read_bytes())
    assert names(root) == names(tree)
    assert names(f"{root}/**/[bc].jsonl") == ["b.jsonl", "sub/c.jsonl"]
    (found,) = find_files(f"{root}/b.jsonl", suffixes=(".jsonl",))
    assert str(found).endswith("/in/b.jsonl")
    with pytest.raises(ValueError, match=r"input\.path: .* names no file"):
        names(f"{root}/missing.jsonl")


def test_what_a_store_raises_is_an_error_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem, place = fsspec.url_to_fs("memory://broken/in.jsonl")
    filesystem.pipe(place, b'{"prompt": "a"}\n')
    (file,) = find_files("memory://broken/in.jsonl", suffixes=(".jsonl",))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the bucket fell over")

    monkeypatch.setattr(type(filesystem), "open", fail)
    with pytest.raises(OSError, match="RuntimeError: the bucket fell over"):
        file.open()
    with pytest.raises(ValueError, match=r"memory://.*/in\.jsonl: cannot be read: RuntimeError"):
        open_reader(InputOptions(format="jsonl", path="memory://broken/in.jsonl"), prompt_columns=["prompt"], limit=None)


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_url_whose_package_is_missing_names_it() -> None:
    with pytest.raises(ValueError, match=r"input\.path: 'gs://bucket/in' needs a package that is not installed: .*gcsfs"):
        names("gs://bucket/in")


def test_a_url_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"input\.path: 'nowhere://x': .*nowhere"):
        names("nowhere://x")


def test_what_a_run_wrote_is_no_input(tree: Path) -> None:
    before = names(tree)
    for name in ("errors.jsonl", "errors-00000.jsonl", "part-00000.jsonl", "part-100000.jsonl", "_shards.jsonl"):
        (tree / "out" / name).parent.mkdir(exist_ok=True)
        (tree / "out" / name).write_text(f"out/{name}")
    assert names(tree, output_path=str(tree / "out")) == before
    assert names(f"{tree}/**/*.jsonl", output_path=str(tree / "out")) == ["_tmp/x.jsonl", "b.jsonl", "sub/[x].jsonl", "sub/c.jsonl"]
    assert names(tree / "out", output_path=str(tree / "other")) == [
        "errors-00000.jsonl",
        "errors.jsonl",
        "part-00000.jsonl",
        "part-100000.jsonl",
    ]
    with pytest.raises(ValueError, match="only files that a run wrote"):
        names(tree / "out", output_path=str(tree / "out"))


def test_what_a_run_wrote_behind_a_url_is_no_input() -> None:
    filesystem, place = fsspec.url_to_fs("memory://bucket")
    for name in ("in.jsonl", "out/part-00000.jsonl"):
        filesystem.pipe(f"{place}/{name}", name.encode())
    assert names("memory://bucket", output_path="memory://bucket/out/") == ["in.jsonl"]
    assert names("memory://bucket", output_path="/bucket/out") == ["in.jsonl", "out/part-00000.jsonl"]
    assert names("memory://bucket", output_path="nowhere://bucket/out") == ["in.jsonl", "out/part-00000.jsonl"]


@pytest.mark.parametrize(("path", "output"), [("", ""), ("*.jsonl", "."), ("", "sub"), ("**/*.jsonl", "sub/")])
def test_an_output_folder_with_input_in_it_is_refused(tree: Path, path: str, output: str) -> None:
    with pytest.raises(ValueError, match=r"output\.path: .* so input and output would mix"):
        names(tree / path, output_path=str(tree / output))
    assert names(tree / "b.jsonl", output_path=str(tree)) == ["b.jsonl"], "a file that is named is meant"


@pytest.fixture
def of_others() -> Iterator[Path]:
    """A folder with ``a.jsonl``, ``shut/b.jsonl`` and ``_shut/b.jsonl``, the folders locked; we are somebody whom locks keep out."""
    somebody, us = 65534, os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "a.jsonl").write_text("{}")
        for shut in (folder / "shut", folder / "_shut"):
            shut.mkdir()
            (shut / "b.jsonl").write_text("{}")
            shut.chmod(0)
        if us == 0:
            os.seteuid(somebody)
        yield folder
        os.seteuid(us)
        for shut in (folder / "shut", folder / "_shut"):
            shut.chmod(0o700)


@pytest.mark.parametrize("path", ["", "/shut", "/**/*.jsonl", "/*/*.jsonl", "/s*/**/b.jsonl", "/[s]hut/b.jsonl", "/shut/b.jsonl"])
def test_a_folder_that_cannot_be_listed_is_refused(of_others: Path, path: str) -> None:
    with pytest.raises(ValueError, match=rf"input\.path: .* cannot be listed: PermissionError: .*{of_others}/_?shut"):
        find_files(f"{of_others}{path}", suffixes=[".jsonl"])


def test_locked_folders_that_are_none_of_the_input_do_not_matter(of_others: Path) -> None:
    for path in ("/*.jsonl", "/a*", f"/../{of_others.name[:-1]}?/a*"):
        assert [Path(file.path).name for file in find_files(f"{of_others}{path}", suffixes=[])] == ["a.jsonl"]
    with pytest.raises(ValueError, match="names no file"):
        find_files(f"{of_others}/a.jsonl/b.jsonl", suffixes=[])


def test_a_link_to_nothing_is_refused_in_a_folder_too(tree: Path) -> None:
    (tree / "lost.jsonl").symlink_to(tree / "nowhere")
    for path in (tree, f"{tree}/*.jsonl"):
        with pytest.raises(ValueError, match=r"input\.path: .*lost\.jsonl is a link to a file that is not there"):
            find_files(str(path), suffixes=[".jsonl"])


def test_a_glob_may_begin_at_the_root(tree: Path) -> None:
    first, *others = tree.parts[1:]
    names = [file.name for file in find_files("/".join(("", first[:-1] + "?", *others, "a.jsonl.gz")), suffixes=[])]
    assert names == ["/".join((first, *others, "a.jsonl.gz"))]

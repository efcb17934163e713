"""`pagemill verify`: says nothing of a folder that is right, and finds whatever is changed in one."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import _app, verify
from pipeline.archive import read_part
from pipeline.records import FinishedPart

Verified = Callable[..., tuple[int, str]]

ROWS = [
    *({"id": f"r{index}", "prompt": f"Question {index}?"} for index in range(9)),
    *(
        {"id": "bad", "prompt": ""},
        {"id": "two", "prompt": "two answers", "sampling_params": {"n": 2}},
        {"id": "long", "prompt": "x" * 2000},
    ),
]


@pytest.fixture(scope="module")
def finished(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three parts, drawn at temperature 1, with an error row, two samples of one row, and token ids."""
    folder = tmp_path_factory.mktemp("finished")
    assert _app.main([*words_for(tiny_model, folder), "output.token_ids=true"], show=False) == 3
    return folder


def words_for(tiny_model: str, folder: Path) -> list[str]:
    """What runs ``ROWS`` from and into ``folder``, in three parts."""
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        *(f"model.path={tiny_model}", "model.dtype=float32", f"input.path={folder}/in.jsonl", f"output.path={folder}/out"),
        *("sampling.max_tokens=6", "engine.threads=1", "kv_cache.num_blocks=500", "input.rows_per_shard=4", "progress=false"),
    ]


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run's output that a test may spoil."""
    copy = tmp_path / "out"
    copy.mkdir()
    for file in (finished / "out").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def verified(capsys: pytest.CaptureFixture[str]) -> Verified:
    def run(folder: Path, *words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = verify.main([str(folder), *words])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out + shown.err

    return run


def change_part(folder: Path, name: str, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Rewrite a part with other rows, and its manifest line so that the file itself agrees with it."""
    path = folder / name
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    rows = table.to_pylist()
    change(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=table.schema))
    change_line(folder, name, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), bytes=path.stat().st_size)


def change_line(folder: Path, name: str, **values: Any) -> None:
    lines = [json.loads(line) for line in (folder / "_manifest.jsonl").read_text().splitlines()]
    parts = [replace(part, **values) if part.file == name else part for part in map(FinishedPart.read, lines)]
    (folder / "_manifest.jsonl").write_text("".join(json.dumps(part.line()) + "\n" for part in parts))


def test_a_finished_run_is_all_equal(verified: Verified, out: Path) -> None:
    code, shown = verified(out, "rows=50")
    assert code == 0, shown
    assert "parts: 3, rows: 13, error rows: 2" in shown
    assert "one at a time: 10 (seed=0)" in shown  # every ok row; the two samples are one row
    assert "all equal\n" in shown


def test_a_dead_stdout_changes_no_exit_code(command: str, out: Path) -> None:
    (out / "part-00001.arrow").unlink()  # something to tell before the end
    with open("/dev/full", "w") as full:
        done = subprocess.run([command, "verify", str(out)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (3, "pagemill: stdout cannot be written: No space left on device\n")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_every_format_with_columns_is_verified_alike(verified: Verified, tiny_model: str, tmp_path: Path, kind: str) -> None:
    assert _app.main([*words_for(tiny_model, tmp_path), f"output={kind}", "output.prefix=pm_"], show=False) == 3
    code, shown = verified(tmp_path / "out", "rows=50")
    assert code == 0, shown
    assert "parts: 3, rows: 13, error rows: 2" in shown
    assert "one at a time: 10 (seed=0)" in shown


def test_of_batch_lines_the_files_are_verified(verified: Verified, tiny_model: str, tmp_path: Path) -> None:
    assert _app.main([*words_for(tiny_model, tmp_path), "output=openai_batch"], show=False) == 3
    code, shown = verified(tmp_path / "out", "rows=50")
    assert code == 0, shown
    assert "only the files were checked" in shown
    flip(tmp_path / "out" / "part-00001.jsonl")
    code, shown = verified(tmp_path / "out")
    assert code == 3
    assert "part-00001.jsonl: its sha256 is" in shown


def test_which_rows_are_computed_again_depends_on_the_seed(out: Path) -> None:
    from pipeline.archive import Archive
    from pipeline.verify import check_parts

    archive = Archive.open(out)
    samples = [tuple(one.row_key for one in check_parts(archive, num_chosen=3, seed=seed).chosen) for seed in range(200)]
    assert check_parts(archive, num_chosen=3, seed=7).chosen == check_parts(archive, num_chosen=3, seed=7).chosen
    counts = {key: sum(key in sample for sample in samples) for key in {key for sample in samples for key in sample}}
    assert len(counts) == 10 and min(counts.values()) > 30  # 60 each on average, of 200


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit": (lambda out: flip(out / "part-00001.arrow"), "part-00001.arrow: its sha256 is"),
    "cut": (lambda out: (out / "part-00001.arrow").write_bytes((out / "part-00001.arrow").read_bytes()[:-9]), "part-00001.arrow: has "),
    "gone": (lambda out: (out / "part-00002.arrow").unlink(), "part-00002.arrow: _manifest.jsonl says that it is finished, but"),
    "stranger": (lambda out: (out / "part-00009.arrow").write_bytes(b"x"), "part-00009.arrow: _manifest.jsonl does not know it"),
    "line": (lambda out: change_line(out, "part-00000.arrow", rows=9), "part-00000.arrow: has 4 rows, _manifest.jsonl says 9"),
    "label": (lambda out: change_line(out, "part-00000.arrow", last_row_id="z"), "part-00000.arrow: goes from 'r0' to 'r3'"),
    "errors": (
        lambda out: (out / "errors.jsonl").write_text(""),
        "part-00002.arrow: its error rows are not those of errors.jsonl: in.jsonl:11",
    ),
    "order": (
        lambda out: change_part(out, "part-00001.arrow", lambda rows: rows.insert(1, rows.pop(2))),
        "part-00001.arrow: its rows are not those of _shards.jsonl: in.jsonl:6 stands where in.jsonl:5 belongs",
    ),
    "a row": (
        lambda out: change_part(out, "part-00001.arrow", lambda rows: rows.pop(1)),
        "part-00001.arrow: its rows are not those of _shards.jsonl: in.jsonl:6 stands where in.jsonl:5 belongs",
    ),
    "sample": (
        lambda out: change_part(out, "part-00002.arrow", lambda rows: rows.pop(2)),
        "part-00002.arrow: the samples of in.jsonl:10 are numbered [1]",
    ),
    "status": (
        lambda out: change_part(out, "part-00000.arrow", lambda rows: rows[0].update(status="error")),
        "part-00000.arrow: has 1 error rows, _manifest.jsonl says 0",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_spoilt_is_named(verified: Verified, out: Path, what: str) -> None:
    spoil, sentence = SPOILT[what]
    spoil(out)
    code, shown = verified(out)
    assert code == 3
    assert sentence in shown
    assert "all equal" not in shown


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "token": ("in.jsonl:5", lambda row: row["token_ids"].__setitem__(2, 7), "in.jsonl:5: token 2 was 7, is "),
    "shorter": ("in.jsonl:6", lambda row: row["token_ids"].pop(), "in.jsonl:6: token 5 was the end, is "),
    "text": ("in.jsonl:4", lambda row: row.update(generation="~"), "in.jsonl:4: character 0 was '~', is "),
    "end": ("in.jsonl:7", lambda row: row.update(finish_reason="stop"), "in.jsonl:7: finish_reason was 'stop', is 'length' now"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_is_found_by_computing_it_again(verified: Verified, out: Path, what: str) -> None:
    key, spoil, sentence = WRONG[what]
    change_part(out, "part-00001.arrow", lambda rows: [spoil(row) for row in rows if row["row_key"] == key])
    code, shown = verified(out, "rows=50")
    assert code == 3
    assert sentence in shown
    assert sum(line.startswith("in.jsonl:") for line in shown.splitlines()) == 1


def test_the_second_sample_counts_too(verified: Verified, out: Path) -> None:
    change_part(out, "part-00002.arrow", lambda rows: rows[3]["token_ids"].__setitem__(0, 1))
    code, shown = verified(out, "rows=50")
    assert code == 3
    assert "in.jsonl:10: sample 1: token 0 was 1, is " in shown


def test_a_folder_without_a_run_or_with_a_damaged_record_gives_2(verified: Verified, out: Path, tmp_path: Path) -> None:
    code, shown = verified(tmp_path / "nowhere")
    assert (code, shown) == (2, f"pagemill: {tmp_path}/nowhere: holds no run: there is no _run.json in it\n")
    by_hand = (out / "_manifest.jsonl").read_text().replace('"errors": 0', '"errors": 4')
    manifests, shards = (("_manifest.jsonl", "{}\n"), ("_manifest.jsonl", by_hand)), (("_shards.jsonl", "no json\n"), ("_shards.jsonl", ""))
    for name, text in (("_run.json", "[]"), *manifests, *shards):
        kept = (out / name).read_text()
        (out / name).write_text(text)
        code, shown = verified(out)
        assert code == 2
        assert shown.startswith("pagemill: ") and name in shown and "damaged" in shown
        (out / name).write_text(kept)


@pytest.mark.parametrize("spoil", [lambda line: line[:20], lambda line: line.replace('"rows": ', '"rows": 1')], ids=["cut", "altered"])
def test_the_advice_for_a_damaged_line_of_the_manifest_mends_it(
    verified: Verified, tiny_model: str, tmp_path: Path, spoil: Callable[[str], str]
) -> None:
    words, out = words_for(tiny_model, tmp_path), tmp_path / "out"
    assert _app.main(words, show=False) == 3
    first, *others = (out / "_manifest.jsonl").read_text().splitlines()
    (out / "_manifest.jsonl").write_text("".join(line + "\n" for line in (spoil(first), *others)))
    kept = {file: (out / file).stat().st_mtime_ns for file in (json.loads(line)["file"] for line in others)}
    code, shown = verified(out)
    assert code == 2
    assert "run the same `pagemill run` command again" in shown and "resume=force" not in shown
    assert _app.main(words, show=False) == 3
    assert {file: (out / file).stat().st_mtime_ns for file in kept} == kept
    assert verified(out) == (0, "parts: 3, rows: 13, error rows: 2\nall equal\n")


def test_a_manifest_without_a_whole_line_is_left_to_its_owner(verified: Verified, out: Path) -> None:
    (out / "_manifest.jsonl").write_text("oops\n")
    code, shown = verified(out)
    assert (code, "restore it, or use resume=force to start over" in shown) == (2, True)


def test_an_input_that_changed_since_is_refused(verified: Verified, finished: Path, out: Path) -> None:
    before = (finished / "in.jsonl").read_text()
    try:
        (finished / "in.jsonl").write_text(before.replace("Question 5", "Question 6"))
        code, shown = verified(out, "rows=50")
    finally:
        (finished / "in.jsonl").write_text(before)
    assert code == 2
    assert "input.path: in.jsonl is not what it was when part-00001.arrow was made" in shown


def test_parts_of_every_format_read_alike(tmp_path: Path) -> None:
    rows = [{"row_key": "a:0", "token_ids": [1, 2], "generation": "é"}, {"row_key": "a:1", "token_ids": None, "generation": None}]
    table = pa.Table.from_pylist(
        rows, schema=pa.schema({"row_key": pa.string(), "token_ids": pa.list_(pa.int32()), "generation": pa.string()})
    )
    for opened, name in ((pa.ipc.new_file, "file.arrow"), (pa.ipc.new_stream, "stream.arrow")):
        with pa.OSFile(str(tmp_path / name), "wb") as sink, opened(sink, table.schema) as writer:
            writer.write_table(table)
    pq.write_table(table, tmp_path / "part.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "part.jsonl").write_text(lines)
    for name, codec in (("part.jsonl.gz", "gzip"), ("part.jsonl.zst", "zstd")):
        with pa.output_stream(str(tmp_path / name), compression=codec) as sink:
            sink.write(lines.encode())
    for name in ("file.arrow", "stream.arrow", "part.parquet", "part.jsonl", "part.jsonl.gz", "part.jsonl.zst"):
        assert read_part(tmp_path / name, ["row_key", "generation", "token_ids"]) == rows, name
        with pytest.raises(ValueError, match=f"{name}: cannot be read: .*nothing"):
            read_part(tmp_path / name, ["nothing"])


@pytest.fixture
def uploaded(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The run's output behind a URL."""
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    store.put(f"{out}/", "/answers/out/", recursive=True)
    yield "memory://answers/out"
    store.rm("/answers", recursive=True)


def test_a_folder_behind_a_url_is_checked_like_one_here(uploaded: str, out: Path, verified: Verified, tmp_path: Path) -> None:
    assert verified(uploaded, "rows=2") == verified(out, "rows=2")
    part = fsspec.filesystem("memory").cat_file("/answers/out/part-00001.arrow")
    fsspec.filesystem("memory").pipe_file("/answers/out/part-00001.arrow", part[:-1])
    code, said = verified(uploaded)
    assert (code, "part-00001.arrow: its sha256 is" in said) == (3, True)
    assert not list((tmp_path / "cache" / "copies").iterdir()), "the copy is gone"


@pytest.mark.parametrize("url", ["memory://bucket/nothing", "nowhere://x/y"])
def test_a_url_that_leads_nowhere_is_refused(verified: Verified, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    code, said = verified(url)
    assert (code, url in said) == (2, True)


def test_what_is_missing_is_told_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        verify.main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "pagemill verify: error: the following arguments are required: DIR"

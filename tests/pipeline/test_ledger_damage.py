"""Parts and records that are not what a run left: what is set aside and runs again, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import durable

ROWS = [{"id": i, "prompt": f"the same words {i % 3}"} for i in range(40)]


def manifest(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "_manifest.jsonl").read_text().splitlines()]


def cut(out: Path) -> None:
    part = out / "part-00002.arrow"
    part.write_bytes(part.read_bytes()[:-9])


def flip(out: Path) -> None:
    part = out / "part-00002.arrow"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)


def edit(key: str, value: Any) -> Callable[[Path], None]:
    def change(out: Path) -> None:
        lines = [line | {key: value} if line["part"] == 2 else line for line in manifest(out)]
        (out / "_manifest.jsonl").write_text("".join(durable.json_line(line) for line in lines))

    return change


def garble(out: Path) -> None:
    lines = [("oops" if line["part"] == 2 else json.dumps(line)) + "\n" for line in manifest(out)]
    (out / "_manifest.jsonl").write_text("".join(lines))


DAMAGES = {
    "cut": cut,
    "flipped bit": flip,
    "sha256": edit("sha256", "0" * 64),
    "bytes": edit("bytes", 5),
    "rows": edit("rows", 3),
    "more rows": edit("rows", 9),
    "errors": edit("errors", 1),
    "type": edit("rows", "8"),
    "file": edit("file", "../part-00002.arrow"),
    "part": edit("part", 77),
    "no JSON": garble,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_part_that_its_line_does_not_vouch_for_is_kept_aside_and_runs_again(
    run_job, write_jsonl, read_parts, scripted_engine, tmp_path, caplog, damage: str
) -> None:
    path = write_jsonl(ROWS)
    run_job(path)
    whole, out = read_parts(), tmp_path / "out"
    lines = sorted((out / "_manifest.jsonl").read_text().splitlines())
    DAMAGES[damage](out)
    damaged = (out / "part-00002.arrow").read_bytes()
    engine = scripted_engine()
    summary = run_job(path, engine=engine)
    assert (summary.num_rows, summary.num_resumed, len(engine.asked)) == (40, 32, 8)
    assert read_parts().equals(whole)
    assert sorted((out / "_manifest.jsonl").read_text().splitlines()) == lines
    assert (out / "_damaged-part-00002.arrow").read_bytes() == damaged
    assert "part-00002.arrow is not what _manifest.jsonl says" in caplog.text
    assert run_job(path).num_resumed == 40


def test_a_line_of_the_manifest_cannot_lead_out_of_the_folder(run_job, write_jsonl, tmp_path) -> None:
    path = write_jsonl(ROWS)
    run_job(path)
    edit("file", "../part-00002.arrow")(tmp_path / "out")
    (tmp_path / "out" / "part-00002.arrow").rename(tmp_path / "part-00002.arrow")
    (tmp_path / "out" / "part-00077.arrow.tmp").touch()
    assert run_job(path).num_resumed == 32
    assert (tmp_path / "out" / "part-00002.arrow").exists()
    assert not list((tmp_path / "out").glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "[]", "5", '"a"', "null", "{", "{}", '{"part": 0}', "\x00\x01", '[{"a": 1}]'])
@pytest.mark.parametrize("name", ["_run.json", "_manifest.jsonl", "_shards.jsonl"])
def test_a_damaged_record_is_refused_and_nothing_is_touched(run_job, write_jsonl, tmp_path, name: str, text: str) -> None:
    path, out = write_jsonl(ROWS), tmp_path / "out"
    run_job(path)
    (out / name).write_text(text + "\n")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(ValueError, match=rf"(?s){name}.*resume=force"):
        run_job(path)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert run_job(path, resume="force").num_rows == 40


def test_a_damaged_list_of_errors_is_no_reason_to_stop(run_job, write_jsonl, tmp_path) -> None:
    path = write_jsonl([{"prompt": ""} for _ in range(20)])
    run_job(path)
    errors = tmp_path / "out" / "errors.jsonl"
    lines = errors.read_text().splitlines(keepends=True)
    errors.write_text("oops\n[]\n{}\n" + "".join(lines))
    (tmp_path / "out" / "part-00001.arrow").unlink()
    run_job(path)
    assert sorted(errors.read_text().splitlines(keepends=True)) == sorted(lines)

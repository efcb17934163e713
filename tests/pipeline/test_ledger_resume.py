"""Resume: finished parts are never computed again, unfinished ones are, and other settings never mix in."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

import pipeline.runner
from engine import SamplingParams
from pipeline import PromptOptions, Prompts, TextJob, durable

ROWS = [{"id": i, "prompt": f"the same words {i % 3}"} for i in range(40)]


def manifest(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "_manifest.jsonl").read_text().splitlines()]


def test_the_record_of_a_finished_run(run_job, read_parts, write_jsonl, tmp_path) -> None:
    run_job(write_jsonl(ROWS))
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "_manifest.jsonl",
        "_run.json",
        "_shards.jsonl",
        "metrics.json",
        *[f"part-0000{i}.arrow" for i in range(5)],
    ]
    lines = sorted(manifest(out), key=lambda line: line["part"])
    for index, line in enumerate(lines):
        data = (out / line["file"]).read_bytes()
        assert line["sha256"] == hashlib.sha256(data).hexdigest()
        assert line["bytes"] == len(data)
        assert (line["rows"], line["first_row_id"], line["last_row_id"]) == (8, str(index * 8), str(index * 8 + 7))
    record = json.loads((out / "_run.json").read_text())
    assert record["fingerprint"] == {"model": "scripted"}
    assert record["columns"]["num_prompt_tokens"] == "int32"


@pytest.mark.parametrize("stop_after", [1, 13, 30, 39])
@pytest.mark.parametrize("how", ["stop_after", "fail_after"])
def test_a_run_that_broke_off_goes_on_where_it_was(
    run_job, read_parts, write_jsonl, scripted_engine, tmp_path, stop_after: int, how: str
) -> None:
    path = write_jsonl(ROWS)
    run_job(path, out="whole")
    first = scripted_engine(max_waiting=6, **{how: stop_after})
    if how == "stop_after":
        summary = run_job(path, engine=first)
        assert summary.stopped == "signal"
        assert summary.num_unanswered == 40 - summary.num_rows - summary.num_waiting == 40 - stop_after
    else:
        with pytest.raises(RuntimeError, match="the device is gone"):
            run_job(path, engine=first)
    assert first.closed
    kept = {part.name: part.stat().st_mtime_ns for part in (tmp_path / "out").glob("part-*.arrow")}
    second = scripted_engine()
    summary = run_job(path, engine=second)
    assert (summary.num_rows, summary.num_waiting, summary.num_unanswered) == (40, 0, 0)
    assert len(second.asked) == 40 - summary.num_resumed == 40 - stop_after, "nothing that was answered is asked again"
    assert read_parts("out").equals(read_parts("whole"))
    for name, changed in kept.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == changed
    assert not list((tmp_path / "out").glob("*.tmp*"))


def test_nothing_left_loads_no_engine_and_keeps_the_figures(run_job, write_jsonl, tmp_path) -> None:
    path = write_jsonl([*ROWS, {"prompt": ""}])
    first = run_job(path)
    figures = (tmp_path / "out" / "metrics.json").read_text()

    class Unloadable:
        @property
        def stats(self):
            raise AssertionError("no engine is needed")

    again = run_job(path, engine=Unloadable())
    assert (again.num_rows, again.num_ok, again.num_errors) == (first.num_rows, first.num_ok, first.num_errors) == (41, 40, 1)
    assert again.num_resumed == 41
    assert (tmp_path / "out" / "metrics.json").read_text() == figures


@pytest.mark.parametrize("moment", ["errors.jsonl", "_manifest.jsonl", "rename", "renamed"])
def test_a_crash_inside_a_commit_loses_and_doubles_nothing(run_job, read_parts, write_jsonl, tmp_path, monkeypatch, moment: str) -> None:
    rows = [{"id": i, "prompt": "" if i % 5 == 0 else f"some words {i}"} for i in range(40)]
    path = write_jsonl(rows)
    run_job(path, out="whole")
    append, rename = durable.append_lines, durable.rename
    seen = []

    def crashing_append(target: Path, values: Any) -> None:
        append(target, values)
        if target.name == moment:
            seen.append(target)
            if len(seen) == 3:
                with target.open("a") as stream:
                    stream.write('{"part": 9, "cut')
                raise SystemExit

    def crashing_rename(source: Path, target: Path) -> None:
        is_commit = target.name.startswith("part-")
        seen.extend([target] if is_commit and moment.startswith("rename") else [])
        if is_commit and moment == "rename" and len(seen) == 3:
            raise SystemExit
        rename(source, target)
        if is_commit and moment == "renamed" and len(seen) == 3:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(durable, "append_lines", crashing_append)
        patch.setattr(durable, "rename", crashing_rename)
        with pytest.raises(SystemExit):
            run_job(path)
    run_job(path)
    assert read_parts().equals(read_parts("whole"))
    for name in ("errors.jsonl", "_manifest.jsonl", "_shards.jsonl"):
        lines = [sorted((tmp_path / out / name).read_text().splitlines()) for out in ("out", "whole")]
        assert lines[0] == lines[1]
    assert not list((tmp_path / "out").glob("*.tmp")) + list((tmp_path / "out").glob("_damaged*"))


def test_other_settings_are_refused_with_the_difference(run_job, write_jsonl, read_parts) -> None:
    path = write_jsonl(ROWS)
    settings = {"model": "m", "sampling.temperature": 0.0, "sampling.top_k": 0, "sampling.seed": None, "sampling.logit_bias": {"5": 1.0}}
    run_job(path, fingerprint=settings)
    other = settings | {"sampling.temperature": None, "sampling.seed": 5, "sampling.logit_bias": {"5": 2.0}}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the whole message is looked at
        run_job(path, fingerprint=other)
    assert str(caught.value).splitlines()[1:] == [
        "  sampling.logit_bias.5: was 1.0, is 2.0",
        "  sampling.seed: was not set, is 5",
        "  sampling.temperature: was 0.0, is not set",
        "use another output.path, or resume=force to start over",
    ]
    with pytest.raises(ValueError, match=r"\n  column token_ids: was not there, is \"list<item: int32>\""):
        run_job(path, fingerprint=settings, output={"token_ids": True})
    summary = run_job(path, fingerprint=other, resume="force")
    assert (summary.num_rows, summary.num_resumed) == (40, 0)
    assert run_job(path, fingerprint=other).num_resumed == 40


def test_a_run_without_a_finished_part_is_held_to_its_settings_too(run_job, write_jsonl, scripted_engine) -> None:
    path = write_jsonl(ROWS)
    run_job(path, fingerprint={"model": "m"}, engine=scripted_engine(max_waiting=3, stop_after=2))
    with pytest.raises(ValueError, match=r"\n  model: was \"m\", is \"n\""):
        run_job(path, fingerprint={"model": "n"})
    assert run_job(path, fingerprint={"model": "m"}).num_resumed == 2


@pytest.mark.parametrize("met", [True, False])
def test_another_context_counts_where_a_row_met_its_end(run_job, write_jsonl, scripted_engine, tmp_path, met: bool) -> None:
    path = write_jsonl([{"prompt": "x " * 3000 if met else "short"}, *ROWS])
    run_job(path)
    (tmp_path / "out" / "part-00003.arrow").unlink()
    smaller = scripted_engine()
    smaller.max_model_len = 77
    if met:
        with pytest.raises(ValueError, match=r"1 finished rows met the end of a context of 4000 tokens, and now it ends at 77"):
            run_job(path, engine=smaller)
        assert smaller.closed
        assert run_job(path).num_resumed == 33
    else:
        run_job(path, engine=smaller)
        assert json.loads((tmp_path / "out" / "_run.json").read_text())["max_model_len"] == 77


def test_never_refuses_a_folder_with_anything_in_it(run_job, write_jsonl, tmp_path) -> None:
    path = write_jsonl(ROWS)
    run_job(path, resume="never")
    with pytest.raises(ValueError, match=r"output\.path: .* is not empty and resume=never"):
        run_job(path, resume="never")
    with pytest.raises(ValueError, match="resume: 'sometimes'"):
        run_job(path, resume="sometimes")


def test_force_takes_away_only_what_runs_write(run_job, write_jsonl, tmp_path) -> None:
    path = write_jsonl(ROWS)
    run_job(path)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    run_job(write_jsonl(ROWS[:8]), resume="force")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert [file.name for file in (tmp_path / "out").glob("part-*")] == ["part-00000.arrow"]


def test_new_files_get_the_next_parts_wherever_they_sort(run_job, read_parts, write_jsonl, tmp_path) -> None:
    write_jsonl(ROWS[:8], "in/m.jsonl")
    run_job(tmp_path / "in")
    write_jsonl(ROWS[8:16], "in/a.jsonl")
    write_jsonl(ROWS[16:24], "in/z.jsonl")
    summary = run_job(tmp_path / "in")
    assert (summary.num_rows, summary.num_resumed) == (24, 8)
    assert read_parts()["row_key"].to_pylist()[::8] == ["m.jsonl:0", "a.jsonl:0", "z.jsonl:0"]


@pytest.mark.parametrize("finished", [True, False])
def test_rows_that_were_appended_are_the_only_ones_that_run(run_job, read_parts, write_jsonl, scripted_engine, finished: bool) -> None:
    path = write_jsonl(ROWS[:21])  # the last shard has five rows
    if finished:
        run_job(path)
    else:
        run_job(path, engine=scripted_engine(max_waiting=6, stop_after=19))
    write_jsonl(ROWS)
    engine = scripted_engine()
    assert run_job(path, engine=engine, input={"rows_per_shard": 16}).num_resumed == (21 if finished else 19)
    assert len(engine.asked) == (19 if finished else 21)
    assert read_parts()["row_key"].to_pylist() == [f"in.jsonl:{i}" for i in range(40)]


def test_changed_rows_of_a_finished_part_are_refused(run_job, write_jsonl) -> None:
    run_job(write_jsonl(ROWS))
    path = write_jsonl([{**row, "prompt": "other"} for row in ROWS])
    with pytest.raises(ValueError, match=r"part-00000\.arrow holds the answers .* of in\.jsonl, which have changed"):
        run_job(path)


def test_rows_keep_their_parts_when_shards_are_cut_in_another_way(run_job, read_parts, write_jsonl, scripted_engine) -> None:
    path = write_jsonl(ROWS)
    run_job(path, out="whole")
    run_job(path, engine=scripted_engine(max_waiting=6, stop_after=20))
    assert run_job(path, input={"rows_per_shard": 5}).num_resumed == 20
    assert read_parts().equals(read_parts("whole"))


def test_a_part_that_was_taken_away_is_computed_again(run_job, read_parts, write_jsonl, scripted_engine, tmp_path) -> None:
    rows = [{"id": i, "prompt": ""} for i in range(40)]
    path = write_jsonl(rows)
    run_job(path)
    before = read_parts()
    (tmp_path / "out" / "part-00002.arrow").unlink()
    assert run_job(path).num_resumed == 32
    assert read_parts().equals(before)
    errors = [json.loads(line)["row_key"] for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert sorted(errors) == sorted(f"in.jsonl:{i}" for i in range(40))


def test_answers_are_on_the_disk_while_the_others_run(run_job, write_jsonl, scripted_engine, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pipeline.runner, "FLUSH_SECONDS", 0.0)
    seen = []

    class Looking(scripted_engine):
        def generate(self, requests):
            for completion in super().generate(requests):
                yield completion
                with suppress(FileNotFoundError):  # a part was finished meanwhile
                    seen.append(sum(path.stat().st_size for path in (tmp_path / "out").glob("part-*.tmp")))

    run_job(write_jsonl(ROWS), engine=Looking(max_waiting=6))
    assert len(set(seen)) > 10, "it grows with the answers"


def test_parts_of_unknown_origin_are_never_touched(run_job, write_jsonl, tmp_path) -> None:
    path = write_jsonl(ROWS)
    run_job(path)
    (tmp_path / "out" / "_manifest.jsonl").unlink()
    with pytest.raises(ValueError, match=r"part-00000\.arrow, which its _manifest\.jsonl does not know"):
        run_job(path)
    assert (tmp_path / "out" / "part-00000.arrow").exists()


@pytest.mark.parametrize("resume", ["auto", "force"])
@pytest.mark.parametrize("name", ["part-00000.parquet", "metrics.json", "errors.jsonl", "errors-00012.log"])
def test_a_folder_of_somebody_else_is_left_alone(run_job, write_jsonl, tmp_path, resume: str, name: str) -> None:
    theirs = tmp_path / "out" / name
    theirs.parent.mkdir()
    theirs.write_bytes(b"precious")
    with pytest.raises(ValueError, match=rf"{name} but no record of a run"):
        run_job(write_jsonl(ROWS), resume=resume)
    assert theirs.read_bytes() == b"precious"
    assert [path.name for path in theirs.parent.iterdir()] == [name]


@pytest.mark.parametrize("resume", ["auto", "force"])
def test_files_that_no_run_wrote_stay_beside_the_parts(run_job, write_jsonl, tmp_path, resume: str) -> None:
    path = write_jsonl(ROWS, "out/part-00000-c000.jsonl")
    theirs = [path, *(path.with_name(name) for name in ("errors-2024-01.log", "part-time.csv.tmp", "part-list.tmp", "part-b.new"))]
    for each in theirs[1:]:
        each.write_text("precious")
    before = [each.read_bytes() for each in theirs]
    run_job(path)
    assert run_job(path, resume=resume).num_rows == 40
    assert [each.read_bytes() for each in theirs] == before


@pytest.mark.parametrize("name", ["input", "engine"])
def test_a_refused_start_over_takes_nothing_away(run_job, write_jsonl, tmp_path, name: str) -> None:
    path = write_jsonl(ROWS)
    run_job(path)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}

    def refuse() -> NoReturn:
        raise ValueError("model.path: no")

    with pytest.raises(ValueError, match=r"model\.path: no|input\.path"):
        run_job(tmp_path / "nothing.jsonl" if name == "input" else path, load_engine=refuse, resume="force")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_rows_that_went_away_keep_their_parts(run_job, read_parts, write_jsonl, tmp_path, caplog) -> None:
    write_jsonl(ROWS[:16], "in/a.jsonl")
    write_jsonl(ROWS[16:], "in/b.jsonl")
    run_job(tmp_path / "in")
    whole = read_parts()
    (tmp_path / "in" / "a.jsonl").unlink()
    summary = run_job(tmp_path / "in")
    assert (summary.num_rows, summary.num_unanswered) == (24, 0)
    assert "2 finished parts stay, whose rows the input has no more" in caplog.text
    assert read_parts().equals(whole)


def test_an_output_that_cannot_be_is_refused(run_job, write_jsonl, tmp_path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ValueError, match=r"output\.path"):
        run_job(write_jsonl(ROWS), out="file")
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ValueError, match=r"output\.path"):
            run_job(write_jsonl(ROWS), out="closed/out")


@pytest.mark.parametrize("stop_after", [13, 30, 39])
def test_prompts_are_counted_as_cut_by_the_run_that_asks_them(run_job, write_jsonl, scripted_engine, tokenizer, stop_after: int) -> None:
    path = write_jsonl([{"prompt": f"{i:02} " + "x" * 100 * (i % 2)} for i in range(40)])
    options = PromptOptions(on_overflow="truncate_right")

    def job() -> TextJob:
        return TextJob(Prompts(tokenizer, options=options, sampling=SamplingParams(max_tokens=10), chat=False, max_model_len=50))

    def num_cut(engine: Any) -> int:
        return sum(len(request.prompt_token_ids) == 40 for request in engine.asked)

    for engine in (scripted_engine(max_waiting=6, stop_after=stop_after), scripted_engine(max_waiting=6)):
        summary = run_job(path, job=job(), engine=engine)
        assert summary.metrics["prompts_truncated"] == num_cut(engine)
    assert num_cut(engine) < 20

"""A rerun with the scripted engine: only the rows that match change, the old ones are kept, and a crash anywhere is healed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline import InputOptions, OutputOptions, Provenance, durable, run
from pipeline.archive import Archive
from pipeline.columns import OutputColumns
from pipeline.reader import open_reader
from pipeline.rerun import Condition, Rerun
from pipeline.verify import check_parts
from pipeline.writer import PartWriter

# An answer has as many bytes as its prompt, and the scripted engine calls odd lengths cut.
PROMPTS = ["" if i % 7 == 3 else "a b" + "c" * (i % 4) for i in range(40)]
CUT = [i for i, prompt in enumerate(PROMPTS) if len(prompt) % 2]


@pytest.fixture
def new_engine(scripted_engine) -> type:
    """Answers in capitals, so that new answers show."""

    class Shouting(scripted_engine):
        def generate(self, requests) -> Iterator[Any]:
            for completion in super().generate(requests):
                yield dataclasses.replace(completion, text=completion.text.upper(), finish_reason="stop")

    return Shouting


class Folder:
    """A finished run of 40 rows in five parts, and what one can do with it."""

    def __init__(self, path: Path, source: Path, *, job: Any, rows_per_shard: int, output: dict[str, Any]) -> None:
        self.path = path
        self.job = job
        self.input = InputOptions(format=source.suffix[1:], path=str(source), rows_per_shard=rows_per_shard)
        self.output = OutputOptions(path=str(path), **output)

    def run(self, engine: Any, **settings: Any) -> Any:
        output = settings.pop("output", self.output)
        config = {"output": dataclasses.asdict(output)}
        provenance = Provenance(config=config, fingerprint={}, versions={})
        return run(self.job, input=self.input, output=output, provenance=provenance, load_engine=lambda: engine, progress=False, **settings)

    def rerun(self, engine: Any, *where: str) -> Rerun | None:
        archive = Archive.open(self.path)
        whole = open_reader(self.input, prompt_columns=self.job.prompt_columns, limit=None)
        output = self.output
        columns = OutputColumns(whole.schema, fields=(), prefix=output.prefix, token_ids=output.token_ids, logprobs=output.logprobs)
        rerun = Rerun.begin(archive, [Condition.parse(text) for text in where], words=where)
        if rerun is not None:
            own = dataclasses.replace(output, path=str(rerun.folder))
            assert not self.run(engine, output=own, reader=rerun.reader(archive, whole)).stopped
            rerun.merge(archive, reader=whole, columns=columns, writer=PartWriter(output, schema=columns.schema))
            rerun.note(where, merged=True)
        return rerun

    def rows(self) -> list[dict[str, Any]]:
        archive = Archive.open(self.path)
        return [row for part in archive.parts for row in archive.rows(part, archive.columns)]

    def state(self) -> dict[str, Any]:
        """All that a reader of the folder sees, but for the numbers of runs."""
        records = {
            name: sorted((self.path / name).read_text().splitlines()) for name in ("_manifest.jsonl", "_shards.jsonl", "errors.jsonl")
        }
        parts = {
            str(path.relative_to(self.path)): path.read_bytes() for path in self.path.rglob("part-*") if path.parent.name != "_rerun-001"
        }
        return records | parts


def table_of(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


@pytest.fixture
def finished(write_jsonl, text_job, scripted_engine, tmp_path: Path) -> Callable[..., Folder]:
    source = write_jsonl([{"id": i, "prompt": prompt} for i, prompt in enumerate(PROMPTS)])

    def build(name: str = "out", *, source: Path = source, rows_per_shard: int = 8, **output: Any) -> Folder:
        folder = Folder(tmp_path / name, source, job=text_job(), rows_per_shard=rows_per_shard, output=output)
        folder.run(scripted_engine())
        return folder

    return build


@pytest.mark.parametrize(("kind", "prefix"), [("arrow", ""), ("arrow", "pm_"), ("parquet", ""), ("jsonl", "")])
def test_the_rows_that_match_are_replaced_and_no_other(finished, new_engine, kind: str, prefix: str) -> None:
    folder = finished(format=kind, prefix=prefix)
    before = folder.rows()
    engine = new_engine()
    folder.rerun(engine, "finish_reason=length")
    assert sorted(int(request.id.split(":")[1]) for request in engine.asked) == CUT
    after = folder.rows()
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if place in CUT:
            assert new[f"{prefix}generation"] == old[f"{prefix}generation"].upper() != old[f"{prefix}generation"]
            assert new[f"{prefix}finish_reason"] == "stop"
        else:
            assert new == old
    kept = [row for part in sorted((folder.path / "_rerun-001" / "replaced").iterdir()) for row in table_of(part).to_pylist()]
    assert kept == [before[place] for place in CUT]
    assert check_parts(Archive.open(folder.path), num_chosen=0, seed=0).differences == []


def test_columns_that_arrow_cannot_take_from_go_along(finished, new_engine, tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": str(i)}] for i in range(len(PROMPTS))]
    carried = pa.table(
        {"prompt": PROMPTS, "turns": pa.array(turns, pa.large_list(pa.struct({"role": pa.string_view(), "content": pa.string_view()})))}
    )
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as sink, pa.ipc.new_file(sink, carried.schema) as writer:
        writer.write_table(carried)
    folder = finished(source=tmp_path / "in.arrow")
    folder.rerun(new_engine(), "finish_reason=length")
    parts = [table_of(path) for path in sorted(folder.path.glob("part-*"))]
    assert pa.concat_tables(parts).select(carried.column_names).equals(carried)
    replaced = sorted((folder.path / "_rerun-001" / "replaced").iterdir())
    assert [row["turns"] for path in replaced for row in table_of(path).to_pylist()] == [turns[place] for place in CUT]


def test_a_later_run_finds_everything_done(finished, new_engine) -> None:
    folder = finished()
    folder.rerun(new_engine(), "finish_reason=length")
    before = folder.state()
    assert folder.run(None).num_resumed == len(PROMPTS)
    assert folder.state() == before


def test_starting_over_forgets_reruns(finished, new_engine, scripted_engine) -> None:
    folder = finished()
    first = folder.state()
    folder.rerun(new_engine(), "finish_reason=length")
    folder.run(scripted_engine(), resume="force")
    assert folder.state() == first
    assert not list(folder.path.glob("_rerun*"))


def test_where_nothing_matches_nothing_is_made(finished) -> None:
    folder = finished()
    before = sorted(path.name for path in folder.path.iterdir())
    assert folder.rerun(None, "finish_reason=length", "status=error") is None
    assert sorted(path.name for path in folder.path.iterdir()) == before


@pytest.mark.parametrize(
    ("where", "places"),
    [
        (["status=error"], [i for i, prompt in enumerate(PROMPTS) if not prompt]),
        (["error_code=empty_prompt"], [i for i, prompt in enumerate(PROMPTS) if not prompt]),
        (["error_code=null", "finish_reason=length"], CUT),
        (["id=5"], [5]),
        (["row_key=in.jsonl:9"], [9]),
        (["prompt=a bc"], [i for i, prompt in enumerate(PROMPTS) if prompt == "a bc"]),
        (["num_prompt_tokens=6", "status=ok"], [i for i, prompt in enumerate(PROMPTS) if len(prompt) == 6]),
    ],
)
def test_conditions_take_rows_by_any_column(finished, new_engine, where: list[str], places: list[int]) -> None:
    rerun = finished().rerun(new_engine(), *where)
    assert rerun is not None
    assert [part * 8 + place for part, some in rerun.rows.items() for place in some] == places


def test_conditions_that_are_none_are_refused(finished) -> None:
    folder = finished()
    with pytest.raises(ValueError, match=r"^finish: the answers in .* have no such column; they have id, prompt, row_id"):
        folder.rerun(None, "finish=length")
    with pytest.raises(ValueError, match="--where finish_reason: write column=value"):
        folder.rerun(None, "finish_reason")


def test_settings_of_a_row_are_those_of_the_last_rerun_that_replaced_it(finished, new_engine, scripted_engine) -> None:
    folder = finished()
    folder.rerun(new_engine(), "finish_reason=length")
    folder.rerun(new_engine(), "row_key=in.jsonl:0")
    folder.rerun(new_engine(), "row_key=in.jsonl:2")
    archive = Archive.open(folder.path)
    keys = [f"in.jsonl:{place}" for place in range(8)]
    expected = dict.fromkeys(keys, "") | {f"in.jsonl:{place}": "_rerun-001" for place in CUT if place < 8}
    expected |= {"in.jsonl:0": "_rerun-002", "in.jsonl:2": "_rerun-003"}
    assert archive.settings_of(0, keys) == expected
    (folder.path / "part-00000.arrow").unlink()
    folder.run(scripted_engine())
    assert set(Archive.open(folder.path).settings_of(0, keys).values()) == {""}


def test_another_rerun_waits_for_one_that_has_answers_already(finished, new_engine) -> None:
    folder = finished()
    with pytest.raises(RuntimeError, match="the device is gone"):
        folder.rerun(new_engine(fail_after=len(CUT) - 1), "finish_reason=length")
    assert list((folder.path / "_rerun-001").glob("part-*"))
    unfinished = r"_rerun-001: an earlier rerun is not finished; .* \(pagemill rerun .*/out finish_reason=length\), or delete that folder"
    with pytest.raises(ValueError, match=unfinished):
        folder.rerun(new_engine(), "status=error")
    folder.rerun(new_engine(), "finish_reason=length")
    assert folder.rerun(new_engine(), "status=error").folder.name == "_rerun-002"


def test_a_rerun_that_never_answered_a_row_does_not_block_another_one(finished, new_engine) -> None:
    folder = finished()
    broken = new_engine()
    broken.order = lambda waiting: 1 // 0
    with pytest.raises(ZeroDivisionError):
        folder.rerun(broken, "finish_reason=length")
    folder.rerun(new_engine(), "status=error")
    archive = Archive.open(folder.path)
    assert {merge.rerun for merge in archive.merges} == {"_rerun-001"}
    assert check_parts(archive, num_chosen=0, seed=0).differences == []


def test_an_input_that_changed_is_refused(finished, new_engine, write_jsonl) -> None:
    folder = finished()
    write_jsonl([{"id": i, "prompt": prompt + "!"} for i, prompt in enumerate(PROMPTS)])
    with pytest.raises(ValueError, match=r"input\.path: rows 0 and on of in\.jsonl have changed since they were answered"):
        folder.rerun(new_engine(), "finish_reason=length")


def test_a_crash_at_any_moment_is_healed_by_the_same_rerun(finished, new_engine, monkeypatch, tmp_path: Path) -> None:
    whole = finished("whole", rows_per_shard=20)
    whole.rerun(new_engine(), "finish_reason=length")
    expected = whole.state()
    real = {name: getattr(durable, name) for name in ("append_lines", "replace_text", "rename")}
    moment, crashed = 0, True
    while crashed:
        moment, crashed = moment + 1, False
        folder = finished(f"out{moment}", rows_per_shard=20)
        calls = iter(range(moment))

        def crashing(name: str, calls: Iterator[int]) -> Callable[..., None]:
            def call(*args: Any) -> None:
                if next(calls, None) is None:
                    raise SystemExit
                real[name](*args)

            return call

        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(durable, name, crashing(name, calls))
            try:
                folder.rerun(new_engine(), "finish_reason=length")
            except SystemExit:
                crashed = True
        if crashed:
            folder.rerun(new_engine(), "finish_reason=length")
        assert folder.state() == expected, f"killed before write {moment}"
        last = json.loads((folder.path / "_rerun-001" / "_rerun.json").read_text())
        assert last["merged"] is True
    assert moment > 20, "every part takes several writes"

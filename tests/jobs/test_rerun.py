"""`pagemill rerun` against a fresh run with the changed settings: the rows that match become its rows, the others stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import _app, rerun, verify
from jobs._app import read_run
from jobs._record import recorded, with_overrides
from jobs._schema import RunConfig, from_json
from pipeline.archive import Archive
from pipeline.lock import locked

ROWS = [
    *({"id": f"r{index}", "prompt": f"Question {index}?"} for index in range(8)),
    *({"id": "bad", "prompt": ""}, {"id": "two", "prompt": "two", "sampling_params": {"n": 2}}, {"id": "long", "prompt": "x" * 300}),
]


@pytest.fixture
def words(tiny_model: str, tmp_path: Path) -> list[str]:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        *(f"model.path={tiny_model}", "model.dtype=float32", f"input.path={tmp_path}/in.jsonl", "input.rows_per_shard=4", "progress=false"),
        *("sampling.max_tokens=40", "sampling.logit_bias={256: 2}", "engine.threads=1"),
        *("kv_cache.num_blocks=500", "engine.max_model_len=200", "seed=3"),
    ]


@pytest.fixture
def answered(tmp_path: Path, words: list[str]) -> Callable[..., list[dict[str, Any]]]:
    """Run with ``words`` and further ones into the folder ``out``; its rows."""

    def run(out: str, *more: str) -> list[dict[str, Any]]:
        assert _app.main([*words, f"output.path={tmp_path / out}", *more], show=False) == 3
        return rows_of(tmp_path / out)

    return run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """All rows but for what may differ between two runs of one job."""
    rows = []
    for path in sorted(folder.glob("part-*.arrow")):
        with pa.OSFile(str(path)) as file:
            rows += pa.ipc.open_file(file).read_all().drop(["num_cached_tokens"]).to_pylist()
    return rows


def test_rows_that_match_are_those_of_a_fresh_run_with_the_changed_settings(
    answered, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = answered("out", "output.token_ids=true")
    fresh = answered("fresh", "output.token_ids=true", "sampling.max_tokens=80")
    matching = {row["row_key"] for row in before if row["finish_reason"] == "length"}
    assert 0 < len(matching) < len(ROWS) - 2, "some rows are cut and some are not"
    assert rerun.main([str(tmp_path / "out"), "--where", "finish_reason=length", "sampling.max_tokens=80", "progress=false"]) == 0
    after = rows_of(tmp_path / "out")
    assert after == [*(new if new["row_key"] in matching else old for old, new in zip(before, fresh, strict=True))]
    assert after != before
    capsys.readouterr()
    assert verify.main([str(tmp_path / "out"), "rows=99"]) == 0, capsys.readouterr().out
    with_old_settings = recorded(Archive.open(tmp_path / "out"))
    assert with_old_settings.sampling.max_tokens == 40
    assert recorded(Archive.open(tmp_path / "out"), rerun="_rerun-001") == replace(
        with_old_settings,
        sampling=replace(with_old_settings.sampling, max_tokens=80),
        output=replace(with_old_settings.output, path=str(tmp_path / "out" / "_rerun-001")),
    )


def test_failed_rows_are_tried_again_when_the_limit_is_raised(answered, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = answered("out")
    assert [row["error_code"] for row in before if row["status"] == "error"] == ["empty_prompt", "too_long"]
    raised = [str(tmp_path / "out"), "--where", "status=error", "--where", "error_code=too_long", "engine.max_model_len=400"]
    assert rerun.main(raised) == 0
    assert "1 row answered again: 1 ok, 0 with an error" in capsys.readouterr().out
    after = rows_of(tmp_path / "out")
    assert [row["row_key"] for row in after] == [row["row_key"] for row in before]
    assert after[:-1] == before[:-1]
    assert (after[-1]["status"], after[-1]["error_code"], after[-1]["num_prompt_tokens"]) == ("ok", None, 303)
    errors = [json.loads(line)["row_key"] for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert errors == ["in.jsonl:8"]
    assert [row["row_id"] for row in rows_of(tmp_path / "out" / "_rerun-001")] == ["long"]
    assert rerun.main(raised) == 0
    assert "no row meets status=error and error_code=too_long: nothing to do" in capsys.readouterr().out
    assert rerun.main([str(tmp_path / "out"), "--where", "status=error"]) == 3


def test_the_same_run_goes_on_to_see_everything_done(
    answered, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered("out")
    assert rerun.main([str(tmp_path / "out"), "--where", "finish_reason=length", "sampling.max_tokens=80"]) == 0
    after = rows_of(tmp_path / "out")
    capsys.readouterr()
    assert _app.main([*words, f"output.path={tmp_path}/out"], show=False) == 3
    assert f"({len(ROWS)} of them from an earlier run)" in capsys.readouterr().out
    assert rows_of(tmp_path / "out") == after


REFUSED = [
    (["--where", "finish=length"], "finish: the answers in "),
    (["--where", "finish_reason"], "--where finish_reason: write column=value"),
    (["--where", "status=ok", "input.path=other.jsonl"], "input.path: a rerun answers rows of the same run"),
    (["--where", "status=ok", "job=score"], "job: a rerun answers rows of the same run"),
    (["--where", "status=ok", "sampling.top_k=many"], "sampling.top_k: value 'many'"),
    (["--where", "status=ok", "sampling.max_token=5"], "sampling.max_token: unknown key, did you mean max_tokens?"),
    (["--where", "status=ok", "5"], "5: is no key=value"),
]


def test_a_rerun_that_makes_no_sense_is_refused_and_changes_nothing(answered, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered("out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    for more, message in REFUSED:
        capsys.readouterr()
        assert rerun.main([str(tmp_path / "out"), *more]) == 2
        assert capsys.readouterr().err.startswith(f"pagemill: {message}")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
    assert rerun.main(["s3://bucket/out", "--where", "status=ok"]) == 2
    assert "s3://bucket/out: is behind a URL; copy the folder to this machine" in capsys.readouterr().err


@pytest.fixture
def config() -> RunConfig:
    words = ["input.path=rows.jsonl", "seed=7", "sampling.max_tokens=64", "sampling.top_k=5", "engine.max_num_seqs=8"]
    run = read_run([*words, "sampling.logit_bias={42: -5}", "sampling.stop=[END]"])
    return replace(run, prompt=replace(run.prompt, system="half ${ open, {x}"))  # as it comes from a record


def test_a_folder_in_which_a_run_is_going_on_is_left_alone(answered, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered("out")
    with locked(tmp_path / "out", key="output.path"):
        assert rerun.main([str(tmp_path / "out"), "--where", "finish_reason=length"]) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("_rerun*"))


def test_a_configuration_is_read_back_from_its_record(config: RunConfig) -> None:
    assert from_json(RunConfig, json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ([], {}),
        (["sampling.max_tokens=512"], {"sampling": {"max_tokens": 512}}),  # the default, but not the run's
        (["sampling.top_p=0.5", "seed=9"], {"sampling": {"top_p": 0.5}, "seed": 9, "engine": {"seed": 9}}),
        (["seed=0"], {"seed": 0, "engine": {"seed": 0}}),
        (["engine.seed=5"], {"engine": {"seed": 5}}),
        (["engine=cpu"], {"engine": {"device": "cpu", "max_num_seqs": 64}}),
        (["model.path=/other.gguf"], {"model": {"path": "/other.gguf", "sha256": None, "fallback": None}}),
        (["sampling.stop=[]", "progress=false"], {"sampling": {"stop": ()}, "progress": False}),
        (["sampling.logit_bias={1: 2}"], {"sampling": {"logit_bias": {1: 2.0}}}),
    ],
)
def test_overrides_change_what_they_name_and_what_follows_it(config: RunConfig, overrides: list[str], changes: dict[str, Any]) -> None:
    changed = {key: replace(getattr(config, key), **value) if isinstance(value, dict) else value for key, value in changes.items()}
    assert with_overrides(config, overrides) == replace(config, **changed)


def test_a_folder_behind_a_url_is_copied_rerun_and_copied_back_as_the_refusal_says(
    answered, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, there, here = f"file://{tmp_path}/there", tmp_path / "there", tmp_path / "here"
    to_the_url = [*words, f"output.path={url}", f"output.scratch={tmp_path}/scratch", "output.token_ids=true"]
    assert _app.main(to_the_url, show=False) == 3
    asked = ["--where", "finish_reason=length", "sampling.max_tokens=80"]
    assert rerun.main([url, *asked]) == 2
    assert f"{url}: is behind a URL; copy the folder" in capsys.readouterr().err

    shutil.copytree(there, here)
    assert rerun.main([str(here), *asked]) == 0
    shutil.copytree(here, there, dirs_exist_ok=True)
    changed = rows_of(there)
    assert changed == rows_of(here) and changed != answered("plain", "output.token_ids=true")
    assert verify.main([url, "rows=99"]) == 0, "each row with the settings that it has now"
    assert _app.main(to_the_url, show=False) == 3
    assert "from an earlier run" in capsys.readouterr().out
    assert rows_of(there) == changed, "the same command finds nothing to do"


def test_limits_are_one_runs_own(answered, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deadline that is over and a metrics file are no part of what was asked, and a rerun goes on under others."""
    answered("out", "deadline=1h")
    record = tmp_path / "out" / "_run.json"
    of_another_machine = '"prometheus": "/no/such/folder/run.prom"'
    text = record.read_text().replace('"1h"', '"2020-01-01T00:00"').replace('"prometheus": null', of_another_machine)
    assert of_another_machine in text
    record.write_text(text)
    assert verify.main([str(tmp_path / "out"), "rows=1"]) == 0
    asked = [str(tmp_path / "out"), "--where", "status=ok", "sampling.max_tokens=5"]
    assert rerun.main([*asked, "max_rows=3"]) == 75
    metrics = tmp_path / "rerun.prom"
    assert rerun.main([*asked, "max_rows=4", f"metrics.prometheus={metrics}"]) == 75
    assert "pagemill_run_complete" in metrics.read_text()
    assert rerun.main(asked) == 0
    assert "nothing is replaced yet" in capsys.readouterr().err

"""What every format has in common: equal bytes for equal rows, settings that are used or refused, and parts that programs open."""

from __future__ import annotations

from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pytest

from engine import plugins
from pipeline.writer import OutputOptions, PartWriter

FORMATS = plugins.names("pipeline.writers")
COMPRESSED = [(name, compression) for name in FORMATS for compression in plugins.load("pipeline.writers", name, key="output").SUFFIXES]


@pytest.mark.parametrize(("name", "compression"), COMPRESSED)
def test_two_runs_give_equal_bytes(run_job, write_jsonl, scripted_engine, tmp_path: Path, monkeypatch, name: str, compression: str) -> None:
    path = write_jsonl([{"id": f"r{i}", "prompt": f"{i} row" * (i % 5), "tags": ["x"] * i} for i in range(30)])
    output = {"format": name, "compression": compression, "token_ids": True, "logprobs": True}
    run_job(path, out="one", output=output)
    monkeypatch.setattr("time.time", lambda: 4e9)
    monkeypatch.setattr("os.urandom", lambda size: b"\0" * size)
    run_job(path, out="two", output=output, engine=scripted_engine(max_waiting=3))
    files = {
        out: {file.name: file.read_bytes() for file in (tmp_path / out).iterdir() if file.name.startswith(("part-", "errors-"))}
        for out in ("one", "two")
    }
    assert len(files["one"]) >= 4
    assert files["one"] == files["two"]


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_failed_is_null_and_says_why(run_job, write_jsonl, tmp_path: Path, name: str) -> None:
    """Whoever asks for answers that are not null gets no failed row, whatever else they look at."""
    path = write_jsonl([{"id": "good", "prompt": "a b"}, {"id": "bad", "prompt": ""}, {"id": "long", "prompt": "x " * 5000}])
    run_job(path, output={"format": name})
    parts = f"'{tmp_path}/out/part-*.{'jsonl' if name == 'openai_batch' else name}'"
    if name == "arrow":
        rows = polars.read_ipc(tmp_path / "out" / "part-00000.arrow")
    elif name == "openai_batch":
        rows = duckdb.sql(f"select custom_id as row_id, response.body.choices[1].message.content as generation, error from {parts}")
    else:
        rows = duckdb.sql(f"select * from {parts}")
    assert duckdb.sql("select row_id, generation from rows where generation is not null").fetchall() == [("good", "b a")]
    if name == "openai_batch":
        assert len(rows) == 1, "failed rows are in a file of their own"
    else:
        failed = duckdb.sql("select row_id, status, error_code from rows where generation is null order by row_id").fetchall()
        assert failed == [("bad", "error", "empty_prompt"), ("long", "error", "too_long")]


SCHEMA = pa.schema({"row_id": pa.string()})


@pytest.mark.parametrize("name", FORMATS)
def test_a_compression_that_a_format_lacks_is_refused(name: str) -> None:
    had = plugins.load("pipeline.writers", name, key="output").SUFFIXES
    for compression in ("auto", "zstd", "lz4", "gzip", "none"):
        options = OutputOptions(path="x", format=name, compression=compression)
        if compression in ("auto", *had):
            assert PartWriter(options, schema=SCHEMA).suffix in had.values()
        else:
            with pytest.raises(ValueError, match=rf"output\.compression: {name} has .*, but not {compression}"):
                PartWriter(options, schema=SCHEMA)


@pytest.mark.parametrize("name", FORMATS)
def test_a_setting_that_a_format_ignores_is_said(caplog, name: str) -> None:
    PartWriter(OutputOptions(path="x", format=name), schema=SCHEMA)
    assert caplog.records == []
    PartWriter(OutputOptions(path="x", format=name, ipc="stream", model="m"), schema=SCHEMA)
    said = {record.message.split("=")[0] for record in caplog.records}
    used = {"arrow": {"output.ipc"}, "openai_batch": {"output.model"}}.get(name, set())
    assert said == {"output.ipc", "output.model"} - used


def test_bad_settings_are_refused_with_their_keys() -> None:
    with pytest.raises(ValueError, match=r"output: there is no 'csv'; choose one of arrow"):
        PartWriter(OutputOptions(format="csv", path="x"), schema=SCHEMA)
    with pytest.raises(ValueError, match=r"output\.ipc: 'feather'"):
        OutputOptions(path="x", ipc="feather")
    with pytest.raises(ValueError, match=r"output\.compression: 'brotli'"):
        OutputOptions(path="x", compression="brotli")
    with pytest.raises(ValueError, match=r"output\.batch_bytes"):
        OutputOptions(path="x", batch_bytes=0)


def test_another_format_in_the_folder_is_refused_and_takes_nothing_away(run_job, write_jsonl, tmp_path: Path) -> None:
    path = write_jsonl([{"prompt": f"row {i}"} for i in range(20)])
    run_job(path, fingerprint={"output.format": "arrow"})
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match=r"output\.format: was \"arrow\", is \"parquet\""):
        run_job(path, output={"format": "parquet"}, fingerprint={"output.format": "parquet"})
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before

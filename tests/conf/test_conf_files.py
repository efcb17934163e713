"""Every file in conf/ composes into typed values, and what the files say about defaults and names is true."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

import conf
from engine import EngineConfig, KVCacheConfig, SamplingParams, plugins
from jobs import _conf
from jobs._app import compose, read_run
from jobs._bench.config import BenchConfig
from jobs._bench.tables import TableOptions
from jobs._schema import RunConfig
from pipeline import InputOptions, OutputOptions, PromptOptions

CONF = Path(conf.__file__).parent
ALL_OPTIONS = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]
OPTIONS = [(group, option) for group, option in ALL_OPTIONS if group in _conf.groups()]
DEFAULT_FILES = [(group, option) for group, option in _conf.groups().items() if option is not None]


def test_every_folder_is_a_group_of_the_table_of_contents() -> None:
    assert {group for group, _ in ALL_OPTIONS} == {*_conf.groups(), *_conf.groups("bench")}


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes(group: str, option: str) -> None:
    run = read_run(["input.path=rows.jsonl", f"{group}={option}"])
    assert isinstance(run, RunConfig)
    if group in ("input", "output", "kv_cache"):
        assert getattr(run, group).format == option
    if group == "job":
        assert run.job.name == option


def test_files_repeat_the_defaults_of_the_code() -> None:
    run = read_run(["input.path=/rows.jsonl", "output.path=/out"])
    assert run.engine == EngineConfig()
    assert run.kv_cache == KVCacheConfig()
    assert run.prompt == PromptOptions()
    assert run.input == InputOptions(format="jsonl", path="/rows.jsonl")
    assert run.output == OutputOptions(path="/out")
    assert run.sampling == SamplingParams(max_tokens=512)


@pytest.mark.parametrize(("group", "option"), DEFAULT_FILES)
def test_default_file_documents_every_key(group: str, option: str) -> None:
    fields = dataclasses.fields(get_type_hints(RunConfig)[group])
    text = _conf.text(f"{group}/{option}.yaml")
    assert set(yaml.safe_load(text)) == {field.name for field in fields}
    for line in text.splitlines():
        assert "#" in line, f"no comment: {line}"


@pytest.mark.parametrize(("group", "package"), [("input", "pipeline.readers"), ("output", "pipeline.writers"), ("job", "jobs")])
def test_option_is_the_name_of_a_module(group: str, package: str) -> None:
    assert set(_conf.options(group)) <= set(plugins.names(package))


def test_a_page_names_tables_that_exist() -> None:
    for option in _conf.options("table"):
        config = compose("bench", [f"table={option}"], kind=BenchConfig)
        assert set(config.table.tables) <= set(plugins.names("jobs._bench.tables"))
        assert config.table == TableOptions(title=config.table.title, tables=config.table.tables, texts=config.table.texts)


def test_the_page_of_the_kv_cache_has_every_table() -> None:
    assert set(compose("bench", ["table=kv"], kind=BenchConfig).table.tables) == set(plugins.names("jobs._bench.tables"))


@pytest.mark.parametrize("package", ["pipeline.readers", "pipeline.writers"])
def test_every_format_has_an_option(package: str) -> None:
    group = {"pipeline.readers": "input", "pipeline.writers": "output"}[package]
    assert set(plugins.names(package)) <= set(_conf.options(group))


def test_every_kv_format_has_an_option() -> None:
    assert set(_conf.options("kv_cache")) == {"auto", *plugins.names("engine.kv.formats")}


def test_presets_name_files_that_exist_wherever_they_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(read_run(["preset=smoke"]).input.path).is_file()
    assert read_run(["preset=smoke"]).sampling.temperature == 0.0
    if not (CONF.parent / "data").is_dir():
        pytest.skip("the demo's samples lie in a checkout only")
    demo = read_run(["preset=demo"])
    assert Path(demo.input.path).is_file()
    assert demo.prompt.system_file is not None and Path(demo.prompt.system_file).is_file()

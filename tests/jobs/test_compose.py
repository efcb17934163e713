"""Overrides become typed values or one sentence that names the key."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from hypothesis import given, strategies as st
from omegaconf import OmegaConf

from jobs._app import read_run
from jobs._compose import _stem
from jobs._schema import RunConfig, absolute, as_yaml, schema_of, typed

REFUSED = [
    ("output.path=memory://answers", "output.path: memory://answers would be gone with this process; name a folder"),
    ("engine.max_num_seq=3", "engine.max_num_seq: unknown key, did you mean max_num_seqs?"),
    ("+engine.speed=9", "engine.speed: unknown key"),
    ("++sampling.temprature=1", "sampling.temprature: unknown key, did you mean temperature?"),
    ("modle=smollm2_135m", "modle: unknown key, did you mean model?"),
    ("+modle=x", "modle: unknown key, did you mean model?"),
    ("model=gpt9", "model: there is no 'gpt9'; choose one of llama3_1_8b, qwen3_0_6b, smollm2_135m"),
    ("preset=nothing", "preset: there is no 'nothing'; choose one of demo, smoke"),
    ("engine.max_num_seqs=many", "engine.max_num_seqs: value 'many' of type 'str' could not be converted to Integer"),
    ("engine.threads=true", "engine.threads: value 'True' of type 'bool'"),
    ("limit=2.5", "limit: value '2.5' of type 'float'"),
    ("limit=0", "limit: 0 must be 1 or more"),
    ("input.path=", "input.path: is empty; name a file"),
    ("output.path=", "output.path: is empty; name a folder"),
    ("engine.threads=100000", "engine.threads: 100000 is over 1024"),
    ("stall_seconds=nan", "stall_seconds: nan must be over 0"),
    ("deadline=99999999999d", "deadline: 99999999999d is too far away"),
    ("metrics.prometheus=run.txt", "metrics.prometheus: 'run.txt' is no file on this machine that ends in .prom"),
    ("metrics.prometheus=s3://bucket/run.prom", "metrics.prometheus: 's3://bucket/run.prom' is no file on this machine"),
    ("metrics.promtheus=run.prom", "metrics.promtheus: unknown key, did you mean prometheus?"),
    ("progress=maybe", "progress: value 'maybe' is not a valid bool"),
    ("resume=sometimes", "resume: 'sometimes' is not one of auto, never, force"),
    ("kv_cache.memory=[1]", "kv_cache.memory: value '[1]'"),
    ("kv_cache.memory=lots", "kv_cache.memory: 'lots' is not a size; write for example"),
    ("kv_cache.block_size=0", "kv_cache.block_size: 0 is not in 1..1024"),
    ("kv_cache.admission=null", "kv_cache.admission: may not be null; leave it out for its default"),
    ("sampling.stop_token_ids=[a]", "sampling.stop_token_ids[0]: value 'a'"),
    ("sampling.stop=END", """sampling.stop: takes a list; write 'sampling.stop=["END"]'"""),
    ("++sampling.stop=END", """sampling.stop: takes a list; write 'sampling.stop=["END"]'"""),
    ('sampling.stop=[""]', "sampling.stop: an empty text"),
    ("sampling.logit_bias={a: 1}", "sampling.logit_bias: {'a': 1} does not map token ids to numbers"),
    ("sampling.temperature=-1", "sampling.temperature: -1.0 is not a number in [0, inf]"),
    ("model.dtype=float8", "model.dtype: 'float8' is not one of auto, float32"),
    ("output.compression=rar", "output.compression: 'rar' is not one of zstd"),
    ("input.path=package:no_such_package/x", "package:no_such_package/x: there is no installed package"),
    ("~model", "model.path: there is no value; write model.path=..."),
    ("hydra.run.dir=/tmp/x", "hydra.run.dir=/tmp/x: Hydra's own settings are not taken"),
    ("job", "job: Hydra cannot read this"),
]
UNQUOTED = ["prompt.system=你好", "prompt.system=(hi", "prompt.system=Say hi, then stop: now"]
QUOTED = [
    ('prompt.system="You are kind, brief (and honest)."', "You are kind, brief (and honest)."),
    ("prompt.system='a=b: {x}'", "a=b: {x}"),
    ('prompt.system="50% off | user@example.com #1"', "50% off | user@example.com #1"),
    ('prompt.system="你好，世界"', "你好，世界"),
    ('prompt.system="it\'s"', "it's"),
    ('prompt.system="one\\ntwo"', "one\\ntwo"),  # the rule: a backslash stays one; lines of text belong into a file
    ("prompt.system='\\${name}'", "${name}"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_refusal_names_the_key(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as refused:
        read_run(["input.path=rows.jsonl", override])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("override", UNQUOTED)
def test_grammar_errors_show_the_quoted_form(override: str) -> None:
    with pytest.raises(ValueError, match=r"'prompt\.system=\"Be brief, please\.\"'.*prompt\.system_file=FILE") as refused:
        read_run(["input.path=rows.jsonl", override])
    assert override in str(refused.value)


@pytest.mark.parametrize(("override", "text"), QUOTED)
def test_quoted_text_arrives_as_it_is(override: str, text: str) -> None:
    assert read_run(["input.path=rows.jsonl", override]).prompt.system == text


@pytest.mark.parametrize("text", ["${seed}", "${oc.env:HOME}", "Explain ${HOME:-x}", "half ${ open"])
@pytest.mark.parametrize("key", ["system", "template"])
def test_prompt_is_never_replaced_by_another_value(key: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^prompt\.{key}: .*file"):
        read_run(["input.path=rows.jsonl", f"prompt.{key}='{text}'"])


def test_missing_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"^input\.path: there is no value; write input\.path="):
        read_run([])


def test_paths_are_relative_to_the_start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = read_run(["input.path=data/in.jsonl", "metrics.prometheus=run.prom"])
    assert run.input.path == str(tmp_path / "data/in.jsonl")
    assert run.output.path == str(tmp_path / "outputs/in")
    assert run.metrics.prometheus == str(tmp_path / "run.prom")
    assert absolute("s3://bucket/in.jsonl") == "s3://bucket/in.jsonl"
    assert absolute("/data/in.jsonl") == "/data/in.jsonl"


@given(st.text(min_size=1))
def test_default_name_is_one_safe_folder(text: str) -> None:
    name = _stem(text)
    assert 0 < len(name.encode()) <= 255
    assert not set(name) & set("/\\,[]{}=\0 ") and name not in (".", "..")


def test_another_model_path_drops_the_hash_of_the_option() -> None:
    run = read_run(["input.path=rows.jsonl", "model.path=/models/mine.gguf"])
    assert (run.model.sha256, run.model.fallback) == (None, None)
    own = read_run(["input.path=rows.jsonl", "model.path=/models/mine.gguf", "model.sha256=00ff"])
    assert own.model.sha256 == "00ff"


def test_seed_keys_the_engine() -> None:
    assert read_run(["input.path=rows.jsonl", "seed=7"]).engine.seed == 7


SAMPLING = [
    ("sampling.stop=[END,STOP]", "stop", ("END", "STOP")),
    ('sampling.stop=["###","\\n"]', "stop", ("###", "\\n")),  # the rule again: a backslash stays one
    ("sampling.bad_words=[never, ever]", "bad_words", ("never", "ever")),
    ("sampling.logit_bias={42: -5, 7: 0.5}", "logit_bias", {42: -5.0, 7: 0.5}),
    ("sampling.logit_bias.42=-5", "logit_bias", {42: -5.0}),
    ("sampling.allowed_token_ids=[1,2]", "allowed_token_ids", (1, 2)),
    ("sampling.logprob_token_ids=[3]", "logprob_token_ids", (3,)),
    ("sampling.prompt_logprobs=0", "prompt_logprobs", 0),
    ("sampling.skip_special_tokens=false", "skip_special_tokens", False),
    ("sampling.repetition_penalty=1.3", "repetition_penalty", 1.3),
]


@pytest.mark.parametrize(("override", "key", "value"), SAMPLING)
def test_lists_and_mappings_arrive_typed(override: str, key: str, value: object) -> None:
    assert getattr(read_run(["input.path=rows.jsonl", override]).sampling, key) == value


LISTS = [
    (group, item.name)
    for group, kind in get_type_hints(RunConfig).items()
    if is_dataclass(kind)
    for item in fields(kind)
    if "tuple" in str(item.type)
]


@pytest.mark.parametrize(("group", "key"), LISTS)
def test_one_value_where_a_list_belongs_is_refused_with_the_word_to_write(group: str, key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{group}\.{key}: takes a list; write ") as refused:
        read_run(["input.path=rows.jsonl", f"{group}.{key}=5"])
    words = shlex.split(str(refused.value).partition("; write ")[2])
    config = read_run(["input.path=rows.jsonl", *words])
    assert [str(item) for item in getattr(getattr(config, group), key)] == ["5"]


@pytest.mark.parametrize("text", ["abc", "two words", 'say "x"', "a\\b", "[", "a,b: {c}", "你好"])
def test_the_word_to_write_gives_the_text_that_was_meant(text: str) -> None:
    with pytest.raises(ValueError, match=r"^sampling\.stop: takes a list; write ") as refused:
        read_run(["input.path=rows.jsonl", f"sampling.stop='{text}'"])
    words = shlex.split(str(refused.value).partition("; write ")[2])
    assert read_run(["input.path=rows.jsonl", *words]).sampling.stop == (text,)


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("sampling.logprobs=2", True),
        ("sampling.logprob_token_ids=[5]", True),
        ("sampling.prompt_logprobs=0", True),
        ("output.logprobs=true", True),
        ("sampling.top_k=2", False),
    ],
)
def test_log_probabilities_that_are_asked_for_get_their_columns(override: str, shown: bool) -> None:
    assert read_run(["input.path=rows.jsonl", override]).output.logprobs is shown


def test_stop_texts_with_line_breaks_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling" / "lines.yaml").write_text('defaults: [default]\nstop: ["\\n\\n"]\nlogit_bias: {5: 1}\n')
    run = read_run(["input.path=rows.jsonl", f"hydra.searchpath=[{tmp_path}]", "sampling=lines"])
    assert (run.sampling.stop, run.sampling.logit_bias) == (("\n\n",), {5: 1.0})


def test_what_is_shown_is_what_is_read() -> None:
    run = read_run(["input.path=rows.jsonl", "sampling.logit_bias={42: -5}", "sampling.stop=[END]"])
    assert typed(RunConfig, OmegaConf.create(yaml.safe_load(as_yaml(run)))) == run


def test_options_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling" / "mine.yaml").write_text("defaults: [default]\ntemperature: 0.3\n")
    run = read_run(["input.path=rows.jsonl", f"hydra.searchpath=[{tmp_path}]", "sampling=mine"])
    assert (run.sampling.temperature, run.sampling.max_tokens) == (0.3, 512)
    (tmp_path / "sampling" / "broken.yaml").write_text("temprature: 0.3\n")
    with pytest.raises(ValueError, match=r"sampling\.temprature: unknown key"):
        read_run(["input.path=rows.jsonl", f"hydra.searchpath=[{tmp_path}]", "sampling=broken"])
    (tmp_path / "sampling" / "text.yaml").write_text('defaults: [default]\nstop: "a, b"\n')
    with pytest.raises(ValueError, match=re.escape("""takes a list; write 'sampling.stop=["a, b"]'""")):
        read_run(["input.path=rows.jsonl", f"hydra.searchpath=[{tmp_path}]", "sampling=text"])
    (tmp_path / "sampling" / "torn.yaml").write_text("temperature: [0.3\n")
    with pytest.raises(ValueError, match=r"torn\.yaml.*line 2"):
        read_run(["input.path=rows.jsonl", f"hydra.searchpath=[{tmp_path}]", "sampling=torn"])


def test_typed_is_the_inverse_of_schema_of() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Inner:
        ids: tuple[int, ...] = ()
        names: tuple[str, ...] | None = None
        size: str | int | None = None

    globals()["Inner"] = Inner  # annotations are text here and are looked up in the module

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Outer:
        inner: Inner
        flag: bool = False

    config = OmegaConf.structured(schema_of(Outer))
    config.inner.ids, config.inner.names, config.inner.size = [1, 2], ["a"], "4GiB"
    assert typed(Outer, config) == Outer(inner=Inner(ids=(1, 2), names=("a",), size="4GiB"))

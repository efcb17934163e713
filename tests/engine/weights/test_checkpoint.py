"""What model.path may name, and what is said when it names nothing."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

from engine import Tokenizer
from engine.config import ModelConfig
from engine.weights import checkpoint_folder, read_spec


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/no/such/folder", "no folder /no/such/folder"),
        ("./no/such", "no folder"),
        ("nothing", "no folder nothing"),
        ("/no/such/file.gguf", "no file /no/such/file.gguf"),
        ("package:no_such_package/x.gguf", "no installed package no_such_package"),
        ("package:json/x.gguf", "no installed package json holds x.gguf"),
    ],
)
def test_what_is_not_there_is_named(cache, path, words):
    with pytest.raises(ValueError, match=rf"model\.path.*{words}"):
        checkpoint_folder(ModelConfig(path=path))


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path.*no config\.json"):
        read_spec(ModelConfig(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"model\.path.*not JSON"):
        read_spec(ModelConfig(path=str(tmp_path)))


def test_hub_id_out_of_reach_says_what_to_do(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"model\.path: someone/some-model.*go online once"):
        checkpoint_folder(ModelConfig(path="someone/some-model"))


def test_missing_package_falls_back_with_a_note(monkeypatch, tmp_path, caplog):
    """A folder stands in for the hub id, so that the test needs no network."""
    fallback = tmp_path / "model"
    fallback.mkdir()
    config = ModelConfig(path="package:no_such_package/x.gguf", sha256="00", fallback=str(fallback))
    assert checkpoint_folder(config) == fallback
    assert "no_such_package" in caplog.text
    assert str(fallback) in caplog.text


def test_a_package_file_is_found_without_importing_the_package(cache, monkeypatch, tmp_path):
    package = tmp_path / "explosive"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "x.gguf").write_bytes(b"no gguf")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ValueError, match=r"model\.sha256.*x\.gguf hashes to"):
        checkpoint_folder(ModelConfig(path="package:explosive/x.gguf", sha256="00"))


BROKEN = [
    ("config.json", "hidden_size", "wide", r"config\.json has hidden_size='wide'"),
    ("config.json", "num_attention_heads", 0, r"config\.json has num_attention_heads=0"),
    ("config.json", "num_hidden_layers", 2.5, r"config\.json has num_hidden_layers=2\.5"),
    ("config.json", "vocab_size", [], r"config\.json has vocab_size=\[\]"),
    ("config.json", "rope_scaling", "much", r"config\.json has a value of a wrong type"),
    ("config.json", "eos_token_id", "end", r"eos_token_id='end', which is neither"),
    ("tokenizer_config.json", "eos_token", 7, r"tokenizer_config\.json has eos_token=7"),
]


@pytest.mark.parametrize(("name", "key", "value", "words"), BROKEN)
def test_a_broken_value_in_a_model_folder_is_refused_by_name(tiny_model, tmp_path, name, key, value, words):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(values | {key: value}))
    config = ModelConfig(path=str(folder))
    load = Tokenizer.load if "eos" in key else read_spec
    with pytest.raises(ValueError, match=rf"^model\.(path|tokenizer): .*{words}"):
        load(config)


@pytest.mark.parametrize("text", ["{}", "[]", "", "no JSON"])
def test_a_tokenizer_file_that_is_none_is_refused(tiny_model, tmp_path, text):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"^model\.tokenizer: .*tokenizer\.json is no file of the tokenizers library"):
        Tokenizer.load(ModelConfig(path=str(folder)))

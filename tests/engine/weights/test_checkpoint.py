"""What model.path may name, and what is said when it names nothing."""

from __future__ import annotations

import sys

import pytest

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

"""Files in the cache appear whole or not at all, and a hash follows its file."""

from __future__ import annotations

import hashlib
import os

import pytest

from engine.weights.cache import cache_root, replacing, sha256_of


def test_environment_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("PAGEMILL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / ".cache" / "pagemill"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_root()) == "/xdg/pagemill"
    monkeypatch.setenv("PAGEMILL_CACHE", "/own")
    assert str(cache_root()) == "/own"


def test_a_file_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "kept").write_text("old")

    def fail_halfway():
        with replacing(tmp_path / "kept") as out:
            out.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "old"


def test_unwritable_folder_says_how_to_choose_another(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="PAGEMILL_CACHE"), replacing(tmp_path / "file" / "entry"):
        pass


def test_hash_follows_the_content(cache, tmp_path):
    path = tmp_path / "data"
    for text, time in (("one", 1), ("two", 2), ("three", 3)):
        path.write_text(text)
        os.utime(path, (time, time))
        assert sha256_of(path) == sha256_of(path) == hashlib.sha256(text.encode()).hexdigest()

"""A model is what its files hold: not where they lie, and not what else lies beside them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine import ModelConfig, model_identity


@pytest.fixture
def folder(tiny_model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def identity(folder: Path, **settings: str) -> dict[str, str]:
    return model_identity(ModelConfig(path=str(folder), **settings))


def test_a_moved_model_is_the_same(folder: Path, tiny_model: str) -> None:
    (folder / "README.md").write_text("about")
    (folder / "training_args.json").write_text("{}")
    assert identity(folder) == identity(Path(tiny_model))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


CHANGES: dict[str, Callable[[Path], object]] = {
    "config.json": lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text().replace("10000.0", "20000.0")),
    "generation_config.json": lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": 3}'),
    "tokenizer.json": lambda folder: flip(folder / "tokenizer.json", 5),
    "tokenizer_config.json": lambda folder: flip(folder / "tokenizer_config.json", 5),
    "model.safetensors": lambda folder: flip(folder / "model.safetensors", -1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_file_that_changed_is_named(folder: Path, name: str) -> None:
    before = identity(folder)
    CHANGES[name](folder)
    after = identity(folder)
    assert {key for key in {*before, *after} if before.get(key) != after.get(key)} == {name}


def test_weights_count_by_size_header_and_edges(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(5 * 2**20))
    seen = {identity(folder)["model.safetensors"]}
    size = weights.stat().st_size
    for at in (0, 9, 2**20, size - 2**20, size - 1):
        flip(weights, at)
        seen.add(identity(folder)["model.safetensors"])
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert len(seen | {identity(folder)["model.safetensors"]}) == 7


def test_a_tensor_between_the_edges_counts(tmp_path: Path) -> None:
    """As where a part of the layers was trained: the first and the last tensors are the same."""
    tensors = {f"layers.{index}": torch.zeros(2**19, dtype=torch.bfloat16) for index in range(9)}
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    before = identity(tmp_path)
    save_file(tensors | {"layers.4": torch.ones(2**19, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert identity(tmp_path) != before


def test_another_tokenizer_takes_the_place_of_the_own(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert identity(folder, tokenizer=str(other)) == identity(folder)
    flip(folder / "tokenizer.json", 5)
    assert identity(folder, tokenizer=str(other)) == identity(other)


def test_a_gguf_file_counts_by_its_hash(embedded_model: ModelConfig) -> None:
    assert list(model_identity(embedded_model)) == ["gguf"]
    assert len(model_identity(embedded_model)["gguf"]) == 64

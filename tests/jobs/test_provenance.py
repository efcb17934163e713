"""What a run that goes on must share with the one before: what changes answers, and neither places nor speed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import Tokenizer
from jobs._app import read_run
from jobs._provenance import provenance

CHANGES = [
    ("model.dtype=float16", {"model.dtype"}),
    ("model.weights=int8", {"model.weights"}),
    ("model.chat_template='{{ messages }}'", {"model.template_hash"}),
    ("engine.max_model_len=77", {"engine.max_model_len"}),
    ("engine.batch_invariant=true", {"engine.batch_invariant", "engine.attention", "engine.tensor_parallel"}),
    ("sampling.top_p=0.5", {"sampling.top_p"}),
    ("sampling.n=3", {"sampling.n"}),
    ("seed=9", {"seed"}),
    ("prompt.system=kind", {"prompt.system"}),
    ("prompt.on_overflow=truncate_left", {"prompt.on_overflow"}),
    ("input.id_column=name", {"input.id_column"}),
    ("output.prefix=p_", {"output.prefix"}),
]
NO_CHANGES = [
    "engine.threads=1",
    "engine.max_num_seqs=3",
    "engine.attention=reference",
    "engine.tensor_parallel=2",
    "kv_cache.num_blocks=99",
    "kv_cache.block_size=8",
]
NO_CHANGES += [
    "kv_cache.prefix_cache=false",
    "kv_cache.admission=safe",
    "input.rows_per_shard=3",
    "limit=5",
    "deadline=2h",
    "max_rows=3",
    "resume=force",
    "name=other",
]


@pytest.fixture
def fingerprint(tiny_model: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def make(*overrides: str, model: str = tiny_model) -> dict[str, Any]:
        words = [
            f"input.path={tmp_path}/in.jsonl",
            f"output.path={tmp_path}/out",
            f"model.path={model}",
            "model.dtype=float32",
            "job=generate",
        ]
        config = read_run([*words, *overrides])
        return dict(provenance(config, Tokenizer.load(config.model)).fingerprint)

    return make


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {key for key in {*before, *after} if before.get(key) != after.get(key)}


@pytest.mark.parametrize(("override", "keys"), CHANGES)
def test_what_changes_answers_counts_under_its_own_name(fingerprint, override: str, keys: set[str]) -> None:
    assert changed(fingerprint(), fingerprint(override)) == keys


@pytest.mark.parametrize("override", NO_CHANGES)
def test_what_only_changes_the_speed_or_the_extent_does_not(fingerprint, override: str) -> None:
    assert changed(fingerprint(), fingerprint(override)) == set()


def test_a_model_that_moved_is_the_same(fingerprint, tiny_model: str, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_model, tmp_path / "elsewhere")
    assert changed(fingerprint(), fingerprint(model=str(moved))) == set()


def test_every_bit_depends_on_what_computes_it(fingerprint) -> None:
    exact = "engine.batch_invariant=true"
    assert changed(fingerprint(exact), fingerprint(exact, "engine.attention=reference")) == {"engine.attention"}
    assert changed(fingerprint(exact), fingerprint(exact, "engine.tensor_parallel=2")) == {"engine.tensor_parallel"}

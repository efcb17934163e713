"""Saved blocks: what is read is what was written under the same identity and tokens, whatever happened to the folder."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import time
from array import array
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from engine.kv.persist import SavedBlocks

BLOCK_BYTES = 256
FILE_BYTES = BLOCK_BYTES + 32
IDENTITY = {"model": "m", "format": ("bf16", 16)}


class SharedBlock(NamedTuple):
    tokens: bytes
    block: int
    num_users: int
    is_saved: bool

    def prefix(self) -> bytes:
        return self.tokens


def shelf(folder: Path, *, max_bytes: int = 10**6, block_bytes: int = BLOCK_BYTES, **identity) -> SavedBlocks:
    return SavedBlocks(folder, identity=IDENTITY | identity, block_bytes=block_bytes, max_bytes=max_bytes)


def prefix(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def content(block: int) -> bytes:
    return random.Random(block).randbytes(BLOCK_BYTES)


def keep(saved: SavedBlocks, *blocks: tuple[bytes, int], num_users: int = 2) -> None:
    saved.keep([SharedBlock(tokens, block, num_users, False) for tokens, block in blocks], read_block=content)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_size_that_holds_no_block_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^kv_cache\.persist_size: 287 bytes hold not one block, which takes 288"):
        shelf(tmp_path, max_bytes=FILE_BYTES - 1)
    assert files(tmp_path) == []


def test_it_gives_back_what_was_kept_and_nothing_else(tmp_path):
    saved = shelf(tmp_path / "deep" / "folder")
    assert saved.read(prefix(1)) is None
    keep(saved, (prefix(1), 5), (prefix(1, 2), 6))
    again = shelf(tmp_path / "deep" / "folder")
    assert (again.read(prefix(1)), again.read(prefix(1, 2))) == (content(5), content(6))
    assert again.read(prefix(2)) is again.read(prefix(1, 2, 3)) is again.read(b"") is None


@pytest.mark.parametrize("other", [{"model": "n"}, {"format": ("fp32", 16)}, {"format": ("bf16", 32)}, {"more": None}])
def test_another_identity_finds_nothing_and_takes_nothing_away(tmp_path, other, caplog):
    keep(shelf(tmp_path), (prefix(1), 5))
    assert shelf(tmp_path, **other).read(prefix(1)) is None
    assert shelf(tmp_path).read(prefix(1)) == content(5)
    assert not caplog.records


@settings(max_examples=60, deadline=None)
@given(damage=st.one_of(st.integers(0, FILE_BYTES - 1), st.integers(-FILE_BYTES, -1), st.binary(max_size=2 * FILE_BYTES)))
def test_a_damaged_file_is_found_out_taken_away_and_written_again(tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("shelf")
    keep(shelf(folder), (prefix(1), 5))
    (file,) = files(folder)
    whole = file.read_bytes()
    if isinstance(damage, bytes):
        damaged = damage
    elif damage < 0:
        damaged = whole[:damage]
    else:
        damaged = whole[:damage] + bytes([whole[damage] ^ 1]) + whole[damage + 1 :]
    file.write_bytes(damaged)
    saved = shelf(folder)
    assert saved.read(prefix(1)) is None
    assert files(folder) == []
    keep(saved, (prefix(1), 5))
    assert saved.read(prefix(1)) == content(5)


def test_a_file_under_anothers_name_is_no_block(tmp_path, caplog):
    keep(shelf(tmp_path), (prefix(1), 5))
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    keep(shelf(tmp_path), (prefix(2), 6))
    (other,) = (path for path in files(tmp_path) if path != file)
    other.write_bytes(whole)
    saved = shelf(tmp_path)
    assert saved.read(prefix(2)) is None and saved.read(prefix(1)) == content(5)
    file.write_bytes(b"")
    assert saved.read(prefix(1)) is None
    assert len(caplog.records) == 1, "it warns once"


def test_the_folder_keeps_to_its_size_and_what_was_used_last_stays(tmp_path):
    saved = shelf(tmp_path, max_bytes=4 * FILE_BYTES)
    for day in range(6):
        keep(saved, (prefix(day), day))
        time.sleep(0.01)
        keep(saved, (prefix(0), 0))  # used every day
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 4 * FILE_BYTES
    kept = [day for day in range(6) if saved.read(prefix(day)) is not None]
    assert kept == [0, 3, 4, 5]


def test_of_too_many_blocks_the_most_used_are_kept_and_parents_before_children(tmp_path):
    saved = shelf(tmp_path, max_bytes=3 * FILE_BYTES)
    chain = [SharedBlock(prefix(*range(length)), length, 9, False) for length in range(1, 6)]
    rare = [SharedBlock(prefix(100 + i), 100 + i, 2, False) for i in range(5)]
    saved.keep([*rare[:2], *chain, *rare[2:]], read_block=content)
    assert [saved.read(shared.tokens) is not None for shared in chain] == [True, True, True, False, False]
    saved.keep([SharedBlock(prefix(7), 7, 2, False)], read_block=content)
    assert [saved.read(shared.tokens) is not None for shared in chain] == [True, True, False, False, False], "the deepest goes first"


def test_what_was_computed_replaces_what_was_there(tmp_path):
    """Else the rest of a chain with a damaged block would be another engine's work, and damaged ones in it would stay."""
    saved = shelf(tmp_path)
    keep(saved, (prefix(1), 5))
    keep(saved, (prefix(1), 6))
    assert saved.read(prefix(1)) == content(6)


def test_what_was_loaded_is_never_written(tmp_path):
    """Its bytes may not have arrived in the pool before a step was broken off."""
    saved = shelf(tmp_path)
    saved.keep([SharedBlock(prefix(1), 5, 2, True)], read_block=lambda block: pytest.fail("read"))
    assert files(tmp_path) == []


def test_files_of_others_stay_and_abandoned_ones_of_ours_go(tmp_path):
    keep(shelf(tmp_path), (prefix(1), 5))
    (ours,) = files(tmp_path)
    foreign = [tmp_path / name for name in ("notes.txt", "model.kv", f"{'0' * 63}.kv", ".hidden")]
    abandoned, fresh = (tmp_path / f".{ours.name}.{digit * 32}" for digit in "ab")
    for path in (*foreign, abandoned, fresh):
        path.write_bytes(b"x" * 10_000)
    for path in (*foreign, abandoned):
        os.utime(path, (0, 0))
    keep(shelf(tmp_path, max_bytes=FILE_BYTES), (prefix(2), 6))
    assert not ours.exists() and not abandoned.exists()
    assert all(path.exists() for path in (*foreign, fresh))


def test_a_folder_that_cannot_be_is_refused_by_the_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"kv_cache\.persist: the folder .*file/folder cannot be written"):
        shelf(tmp_path / "file" / "folder")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("CUDA error")])
def test_what_cannot_be_kept_is_only_warned_of(tmp_path, caplog, error):
    saved = shelf(tmp_path)

    def fail(block: int) -> bytes:
        if block == 6:
            raise error
        return content(block)

    with caplog.at_level(logging.WARNING):
        saved.keep([SharedBlock(prefix(1), 5, 3, False), SharedBlock(prefix(2), 6, 2, False)], read_block=fail)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["kv_cache.persist"]
    assert saved.read(prefix(1)) == content(5)
    assert len(files(tmp_path)) == 1, "no half file is left"


def write_and_read(folder: Path, seed: int, faults) -> None:
    dice = random.Random(seed)
    saved = shelf(folder, max_bytes=12 * FILE_BYTES)
    saved._warn = faults.put
    for _ in range(150):
        block = dice.randrange(20)
        keep(saved, (prefix(block), block))
        block = dice.randrange(20)
        found = saved.read(prefix(block))
        if found not in (None, content(block)):
            faults.put(f"block {block} is another one")


def test_processes_share_a_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    faults = context.Queue()
    processes = [context.Process(target=write_and_read, args=(tmp_path, seed, faults)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert faults.empty(), faults.get()
    assert 0 < len(files(tmp_path)) <= 12 + 3, "each process bounds what it sees"

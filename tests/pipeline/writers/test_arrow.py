"""Arrow parts: what is written is what is read, in batches bounded by bytes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from pipeline.writer import OutputOptions, PartWriter, batches_by_bytes


def table_of(texts: list[str | None]) -> pa.Table:
    kinds = pa.array([None if text is None else text[:1] for text in texts]).dictionary_encode()
    return pa.table({"n": range(len(texts)), "text": pa.array(texts, pa.string()), "kind": kinds, "tags": [[text] for text in texts]})


@pytest.mark.parametrize("ipc", ["file", "stream"])
@pytest.mark.parametrize("compression", ["zstd", "lz4", "none"])
def test_what_is_written_is_read(tmp_path: Path, ipc: str, compression: str) -> None:
    table = table_of([f"text {i}" for i in range(100)])
    path = tmp_path / "part.arrow"
    PartWriter(OutputOptions(path=str(tmp_path), ipc=ipc, compression=compression, batch_bytes=500), schema=table.schema).write(path, table)
    opened = pa.ipc.open_file if ipc == "file" else pa.ipc.open_stream
    with pa.OSFile(str(path)) as file, opened(file) as reader:
        assert reader.schema == table.schema
        assert reader.read_all().equals(table)


def test_dictionaries_of_several_chunks_fit_one_file(tmp_path: Path) -> None:
    chunks = [pa.table({"kind": pa.array(letters).dictionary_encode()}) for letters in (["a", "b"], ["c"], ["b", "d"])]
    table = pa.concat_tables(chunks).unify_dictionaries()
    PartWriter(OutputOptions(path=str(tmp_path), batch_bytes=8), schema=table.schema).write(tmp_path / "part.arrow", table)
    with pa.OSFile(str(tmp_path / "part.arrow")) as file, pa.ipc.open_file(file) as reader:
        assert reader.num_record_batches > 1
        assert reader.read_all()["kind"].to_pylist() == ["a", "b", "c", "b", "d"]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 2000), max_size=40), max_bytes=st.integers(1, 5000))
def test_batches_are_bounded_by_bytes_and_lose_nothing(sizes: list[int], max_bytes: int) -> None:
    table = table_of(["x" * size for size in sizes]).drop(["kind"])
    batches = list(batches_by_bytes(table, max_bytes=max_bytes))
    assert all(batch.nbytes <= max_bytes or batch.num_rows == 1 for batch in batches)
    assert pa.Table.from_batches(batches, schema=table.schema).equals(table)


def test_a_large_dictionary_does_not_make_tiny_batches() -> None:
    table = pa.table({"kind": pa.array([f"{i:0100d}" for i in range(1000)]).dictionary_encode()})
    assert [batch.num_rows for batch in batches_by_bytes(table, max_bytes=8000)] == [1000]

"""The output's columns: names, types, clashes, and one row a sample."""

from __future__ import annotations

import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from pipeline import TextJob
from pipeline.columns import OutputColumns, repeated
from pipeline.types import RowError
from pipeline.writer import batches_by_bytes

CONTRACT = {
    "row_id": "string",
    "sample_index": "int16",
    "generation": "string",
    "reasoning": "string",
    "row_key": "string",
    "finish_reason": "string",
    "stop_reason": "string",
    "status": "string",
    "error_code": "string",
    "error_message": "string",
    "num_prompt_tokens": "int32",
    "num_cached_tokens": "int32",
    "num_generated_tokens": "int32",
    "cumulative_logprob": "float",
}


def test_the_contract_s_columns_follow_the_input_s(run_job, read_parts, write_jsonl) -> None:
    run_job(write_jsonl([{"tag": 1.5, "prompt": "a b"}]))
    schema = read_parts().schema
    assert {field.name: str(field.type) for field in schema} == {"tag": "double", "prompt": "string", **CONTRACT}
    assert schema.names[:2] == ["tag", "prompt"]


def test_tokens_and_logprobs_on_request(run_job, read_parts, write_jsonl) -> None:
    run_job(write_jsonl([{"prompt": "a b"}, {"prompt": ""}]), output={"token_ids": True, "logprobs": True})
    table = read_parts()
    assert [str(table.schema.field(name).type) for name in ("prompt_token_ids", "token_ids", "logprobs")] == [
        "list<item: int32>",
        "list<item: int32>",
        "list<item: float>",
    ]
    row, error = table.to_pylist()
    assert bytes(row["prompt_token_ids"]) == b"a b"
    assert bytes(row["token_ids"]) == b"b a"
    assert row["logprobs"] == [-0.5] * 3
    assert row["cumulative_logprob"] == -1.5
    assert [error[name] for name in ("prompt_token_ids", "token_ids", "logprobs", "cumulative_logprob")] == [None] * 4


def test_what_a_row_asks_of_log_probabilities_has_its_column(run_job, read_parts, write_jsonl, scripted_engine) -> None:
    class Scoring(scripted_engine):
        """Gives the second row two tokens beside each of its own, and its prompt's log probabilities."""

        def generate(self, requests):
            for completion in super().generate(requests):
                asked = completion.request_id == "in.jsonl:1"
                pairs = (((7, -0.25), (8, -1.5)),) * len(completion.token_ids)
                yield replace(completion, top_logprobs=pairs, prompt_logprobs=(-1.0, -2.0)) if asked else completion

    run_job(write_jsonl([{"prompt": "a b"}, {"prompt": "c d"}, {"prompt": ""}]), engine=Scoring(), output={"logprobs": True})
    table = read_parts()
    names = ["top_logprob_ids", "top_logprobs", "prompt_logprobs"]
    assert table.schema.names[-4:] == ["logprobs", *names]
    assert table.schema.types[-3:] == [pa.list_(pa.list_(pa.int32())), pa.list_(pa.list_(pa.float32())), pa.list_(pa.float32())]
    without, with_, error = table.select(names).to_pylist()
    assert without == error == dict.fromkeys(names)
    assert with_ == {"top_logprob_ids": [[7, 8]] * 3, "top_logprobs": [[-0.25, -1.5]] * 3, "prompt_logprobs": [None, -1.0, -2.0]}


def test_clashes_are_refused_before_any_load_unless_prefixed(run_job, read_parts, write_jsonl, tmp_path) -> None:
    path = write_jsonl([{"prompt": "a b", "finish_reason": "n/a", "status": 5, "Status": "caps", "": "no name", "prompt_token_ids": None}])

    class Unloadable:
        @property
        def stats(self):
            raise AssertionError("no engine may be loaded")

    with pytest.raises(ValueError, match=r"output\.prefix: .*'finish_reason', 'status'; set output\.prefix"):
        run_job(path, engine=Unloadable())
    with pytest.raises(ValueError, match="'prompt_token_ids'"):
        run_job(path, engine=Unloadable(), output={"token_ids": True})
    assert not (tmp_path / "out").exists()
    run_job(path, output={"prefix": "out_"})
    row = read_parts().to_pylist()[0]
    assert (row["finish_reason"], row["status"], row["Status"], row[""]) == ("n/a", 5, "caps", "no name")
    assert (row["out_finish_reason"], row["out_status"], row["out_generation"]) == ("length", "ok", "b a")


@pytest.mark.parametrize(
    ("rows", "options", "labels"),
    [
        ([{"id": "x"}, {"id": "x"}, {"id": ""}, {}], {}, ["x", "x", "", "in.jsonl:3"]),
        ([{"id": 7}, {"id": 2**60}], {}, ["7", str(2**60)]),
        ([{"custom_id": "c"}, {"custom_id": None}], {}, ["c", "in.jsonl:1"]),
        ([{"id": "i", "custom_id": "c"}], {}, ["i"]),
        ([{"id": "i", "name": "n"}], {"id_column": "name"}, ["n"]),
    ],
)
def test_row_ids_are_labels_and_row_keys_are_names(run_job, read_parts, write_jsonl, rows, options, labels) -> None:
    run_job(write_jsonl([{"prompt": "a", **row} for row in rows]), input=options)
    table = read_parts()
    assert table["row_id"].to_pylist() == labels
    assert table["row_key"].to_pylist() == [f"in.jsonl:{i}" for i in range(len(rows))]


def test_every_sample_is_a_row_and_an_error_is_one(run_job, read_parts, tmp_path, scripted_engine) -> None:
    class Sampling(scripted_engine):
        """Each request gives its samples together, as the engine does, but in falling order."""

        def generate(self, requests):
            for completion in super().generate(requests):
                request = next(request for request in self.asked if request.id == completion.request_id)
                failed = completion.finish_reason == "error"
                for index in reversed(range(1 if failed else request.sampling.n)):
                    yield replace(completion, sample_index=index)

    counts = [1, 3, 2, 1, 4, 1, 3, 2, 2, 5]
    table = pa.table(
        {
            "n": counts,
            "prompt": ["x " * 5000 if i == 4 else f"row {i}" for i in range(10)],
            "sampling_params": [{"n": count} for count in counts],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    summary = run_job(tmp_path / "in.parquet", engine=Sampling(), input={"rows_per_shard": 4})
    written = read_parts()
    counts[4] = 1
    assert written["row_key"].to_pylist() == [f"in.parquet:{i}" for i, count in enumerate(counts) for _ in range(count)]
    assert written["sample_index"].to_pylist() == [sample for count in counts for sample in range(count)]
    assert written["n"].to_pylist() == [table["n"][i].as_py() for i, count in enumerate(counts) for _ in range(count)]
    assert (summary.num_rows, summary.num_errors) == (sum(counts), 1)


def test_two_input_columns_of_one_name_are_refused() -> None:
    carried = pa.schema([pa.field("x", pa.int64()), pa.field("y", pa.int64()), pa.field("x", pa.string())])
    with pytest.raises(ValueError, match=r"input\.path: the input has two columns of the name 'x'"):
        OutputColumns(carried, fields=(), prefix="", token_ids=False, logprobs=False)


def test_a_wide_table_costs_no_more_a_column_than_a_narrow_one(run_job, read_parts, tmp_path) -> None:
    table = pa.table({"prompt": ["a b"], **{f"column {i}": [i] for i in range(15_000)}})
    with pa.OSFile(str(tmp_path / "in.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    start = time.process_time()
    run_job(tmp_path / "in.arrow", input={"format": "arrow"})
    assert time.process_time() - start < 15, "a pass over all columns for each of them takes a minute"
    assert read_parts().select(table.column_names).equals(table)


def test_columns_of_every_type_are_repeated_for_every_sample(every_type) -> None:
    carried = pa.table({name: pa.array(column.values, column.type) for name, column in every_type.items()})
    carried = carried.append_column("runs", pa.array(["a", "a", None], pa.run_end_encoded(pa.int32(), pa.string())))
    carried = carried.append_column("views", pa.array([["a"], [], None], pa.list_view(pa.string_view())))
    columns = OutputColumns(carried.schema, fields=(), prefix="", token_ids=False, logprobs=False)
    table = columns.table(carried, [[{}], [{}] * 3, [{}] * 2])
    indices = [0, 1, 1, 1, 2, 2]
    assert table.schema == columns.schema
    assert table["sample_index"].to_pylist() == [0, 0, 1, 2, 0, 1]
    for name in carried.column_names:
        values = carried[name].to_pylist()
        assert repr(table[name].to_pylist()) == repr([values[index] for index in indices]), name


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 6)), min_size=1, max_size=30), max_bytes=st.integers(1, 3000))
def test_rows_are_repeated_in_pieces_of_bounded_bytes(rows: list[tuple[int, int]], max_bytes: int) -> None:
    table = pa.table({"n": range(len(rows)), "text": ["x" * size for size, _ in rows]})
    counts = [count for _, count in rows]
    pieces = list(repeated(table, counts, max_bytes=max_bytes))
    assert pa.concat_tables(pieces).equals(table.take([index for index, count in enumerate(counts) for _ in range(count)]))
    assert all(sum(map(len, piece["text"].to_pylist())) <= max_bytes or piece.num_rows == 1 for piece in pieces)


@pytest.mark.full
def test_many_samples_of_a_long_row_are_more_bytes_than_one_string_column_holds() -> None:
    """Three GiB of prompts: as one piece they cannot be copied at all."""
    carried = pa.table({"prompt": ["x" * 2**26]})
    columns = OutputColumns(carried.schema, fields=(), prefix="", token_ids=False, logprobs=False)
    table = columns.table(carried, [[{}] * 48])
    assert table["prompt"].nbytes > 2**31
    assert sum(batch.num_rows for batch in batches_by_bytes(table, max_bytes=2**23)) == 48


def test_a_job_adds_its_columns_and_may_refuse_an_answer(run_job, read_parts, write_jsonl, text_job) -> None:
    class Counting(TextJob):
        fields = (pa.field("num_words", pa.int32()),)

        def answer(self, completion):
            text = super().answer(completion)["generation"]
            if "bad" in text:
                raise RowError("invalid_output", "the answer has a bad word")
            return {"generation": text, "num_words": len(text.split())}

    run_job(write_jsonl([{"prompt": "a b c"}, {"prompt": "bad"}, {"prompt": "d"}]), job=Counting(text_job().prompts))
    table = read_parts()
    assert table["num_words"].to_pylist() == [3, None, 1]
    assert table["error_code"].to_pylist() == [None, "invalid_output", None]
    assert table["generation"].to_pylist() == ["c b a", None, "d"]

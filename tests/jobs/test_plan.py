"""`pagemill plan` against the run that it is about: the same rows, tokens, columns and refusals, told beforehand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import _app, plan

SYSTEM = "You are the night clerk of a small hotel. Answer in one line and never more than that."


@pytest.fixture
def words(tiny_model: str, tmp_path: Path) -> list[str]:
    return [
        *(f"model.path={tiny_model}", "model.dtype=float32", f"input.path={tmp_path}/in.jsonl", f"output.path={tmp_path}/out"),
        *("sampling=greedy", "sampling.max_tokens=4", "kv_cache.num_blocks=2000", "engine.threads=1", "progress=false"),
    ]


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def build(words: list[str]) -> dict[str, Any]:
        capsys.readouterr()
        assert plan.main([*words, "plan.json=true"], show=False) == 0
        shown: dict[str, Any] = json.loads(capsys.readouterr().out)
        return shown

    return build


def write(tmp_path: Path, rows: list[Any]) -> None:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (tmp_path / "in.jsonl").write_text(text, encoding="utf-8")


def test_the_run_comes_to_what_was_planned(planned, words: list[str], tmp_path: Path) -> None:
    rows = [
        *({"id": index, "prompt": f"Which room has guest {index % 20}?"} for index in range(50)),
        *({"prompt": "x" * 3000}, {"prompt": ""}, "no json", {"prompt": "a", "sampling_params": {"temprature": 1}}, {"id": 1}),
        *({"prompt": "two answers", "sampling_params": {"n": 2}}, {"prompt": "y" * 1100}),
    ]
    write(tmp_path, rows)
    words.append(f'prompt.system="{SYSTEM}"')
    before = planned(words)
    assert not (tmp_path / "out").exists()
    assert _app.main(words, show=False) == 3
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    with pa.ipc.open_file(str(tmp_path / "out" / "part-00000.arrow")) as part:
        table = part.read_all()
    assert before["rows"] == len(rows)
    assert before["prompt_tokens"] == metrics["prompt_tokens"]
    assert 1000 < before["shared_tokens"] <= metrics["cached_prompt_tokens"], "parts of blocks come on top"
    assert before["computed_tokens"] == before["prompt_tokens"] - before["shared_tokens"]
    assert (before["kv_bytes"], before["kv_blocks_total"]) == (metrics["kv_bytes"], metrics["kv_blocks_total"])
    assert before["rows_error_by_code"] == Counter(code for code in table["error_code"].to_pylist() if code is not None)
    assert before["rows_too_long_first"] == [row["row_key"] for row in table.to_pylist() if row["error_code"] == "too_long"]
    assert before["columns"] == {field.name: str(field.type) for field in table.schema}
    lengths = [row["num_prompt_tokens"] for row in table.to_pylist() if row["num_prompt_tokens"] is not None]
    assert (before["prompt_tokens_min"], before["prompt_tokens_max"]) == (min(lengths), max(lengths))
    assert before["context_needed"] == max(lengths) + 4
    assert before["context_limit"] == 1024


def test_scored_prompts_share_nothing(planned, words: list[str], tmp_path: Path) -> None:
    write(tmp_path, [{"prompt": "the same long text in every row"}] * 5)
    before = planned([*words, "job=score"])
    assert _app.main([*words, "job=score"], show=False) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert before["computed_tokens"] == metrics["computed_prompt_tokens"] == before["prompt_tokens"]
    assert before["columns"]["perplexity"] == "double"


def test_memory_is_what_the_settings_ask_for(planned, words: list[str], tmp_path: Path) -> None:
    write(tmp_path, [{"prompt_token_ids": [5] * length} for length in (10, 50, 30)])
    found = planned([*words, "engine.max_num_seqs=2", "kv_cache.block_size=8", "kv_cache.num_blocks=20"])
    token_bytes = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, float32
    assert found["kv_bytes_per_token"] == token_bytes
    assert found["kv_bytes_per_block"] == 8 * token_bytes
    assert found["kv_bytes_needed"] == (7 + 5) * 8 * token_bytes  # 54 and 34 tokens
    assert (found["sequences_fit_mean"], found["sequences_fit_max"]) == (20 // 5, 20 // 7)


@pytest.mark.parametrize(
    ("rows", "extra", "sentence"),
    [
        ([{"prompt": "ends in a blank "}], ["job=generate"], "1 row with blanks at the end of the prompt"),
        ([{"prompt": "twice"}] * 3 + [{"prompt": "once"}], [], "2 rows with the prompt and the settings of an earlier one"),
        ([{"prompt": "x" * 1000}], ["sampling.max_tokens=50"], "1 row that the context's end may cut"),
        ([{"prompt": "long " * 20 + end} for end in "ab"], ["kv_cache.prefix_cache=false"], "prefix_cache=true would save 96 tokens"),
        ([{"prompt": f"{start}{'common ' * 20}"} for start in "ab"], ["job=generate"], "end with the same 140 tokens"),
        ([{"prompt": "x" * 200}] * 2, ["kv_cache.num_blocks=20"], "rows may give way"),
    ],
)
def test_what_looks_amiss_is_told(planned, words: list[str], tmp_path: Path, rows: list[Any], extra: list[str], sentence: str) -> None:
    write(tmp_path, rows)
    assert any(sentence in line for line in planned([*words, *extra])["lint"])


def test_nothing_amiss_is_said_of_plain_rows(planned, words: list[str], tmp_path: Path) -> None:
    write(tmp_path, [{"prompt": "one"}, {"prompt": "and another"}])
    assert planned(words)["lint"] == []


def test_the_table_shows_the_numbers(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [{"prompt": "x" * 2000}] * 7 + [{"prompt": "fine"}])
    assert plan.main(words, show=False) == 0
    shown = capsys.readouterr().out
    assert "rows              8, of them 7 would be error rows" in shown
    assert "too_long        7: in.jsonl:0, in.jsonl:1, in.jsonl:2, in.jsonl:3, in.jsonl:4, ..." in shown
    assert "generation: string" in shown


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["plan.jsn=true"], "plan.jsn: unknown key, did you mean json?"),
        (["plan.json=perhaps"], "plan.json: value 'perhaps' is not a valid bool"),
        (["engine.max_model_len=5000"], "engine.max_model_len: 5000 is over the 1024 positions"),
        (["input.path=nowhere.jsonl"], "input.path: "),
        (["output=poem"], "output: there is no 'poem'"),
    ],
)
def test_a_plan_is_refused_as_the_run_would_be(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    write(tmp_path, [{"prompt": "x"}])
    assert plan.main([*words, *extra], show=False) == 2
    assert capsys.readouterr().err.startswith(f"pagemill: {message}")


def test_a_plan_is_made_without_the_weights(planned, words: list[str], tmp_path: Path, tiny_model: str) -> None:
    write(tmp_path, [{"prompt": "x"}])
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in Path(tiny_model).glob("*.json"):
        (bare / file.name).write_bytes(file.read_bytes())
    assert planned([*words, f"model.path={bare}"])["rows_ok"] == 1


def bare_model(tmp_path: Path, tiny_model: str) -> Path:
    """A folder with a config.json and nothing else."""
    bare = tmp_path / "config only"
    bare.mkdir()
    (bare / "config.json").write_bytes((Path(tiny_model) / "config.json").read_bytes())
    return bare


def test_sequences_that_fit_are_told_of_a_config_alone(planned, words: list[str], tmp_path: Path, tiny_model: str) -> None:
    write(tmp_path, [{"prompt": "x"}])
    model = f"model.path={bare_model(tmp_path, tiny_model)}"
    whole, config_only = planned(words), planned([*words, model])
    assert "rows" in whole and "rows" not in config_only
    assert "has no tokenizer.json" in config_only["left_out"]
    assert {key: whole[key] for key in config_only if key != "left_out"} == {
        key: config_only[key] for key in config_only if key != "left_out"
    }
    without_input = planned([word for word in words if not word.startswith("input.")])
    assert without_input["sequences_fit"] == whole["sequences_fit"]
    assert "input.path names no input" in without_input["left_out"]
    # 2 layers, keys and values, 2 heads of 8 numbers of 4 bytes; 2,000 blocks of 16
    assert whole["sequences_fit"]["fp32"] == {"kv_bytes_per_token": 256.0, "contiguous": 31, "paged": {"1024": 31}}
    assert whole["kv_formula"].endswith("x 4 bytes = 256 bytes a token")


def test_the_table_has_a_line_for_each_format(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [{"prompt": "fine"}])
    assert plan.main(words, show=False) == 0
    shown = capsys.readouterr().out
    assert "2 (key, value) x 2 layers x 2 KV heads x 8 head size x 4 bytes = 256 bytes a token, 4 KiB a block of 16" in shown
    assert all(f"{name} " in shown for name in ("fp32 *", "bf16", "fp16"))


@pytest.mark.parametrize("mode", ["truncate_left", "truncate_right", "truncate_middle"])
def test_a_plan_and_its_run_cut_the_same_prompts(planned, words: list[str], tmp_path: Path, mode: str, capsys) -> None:
    write(tmp_path, [{"prompt": "x" * 3000}, {"prompt": "short"}, {"prompt": "y" * 1019}])
    words = [*words, f"prompt.on_overflow={mode}"]
    found = planned(words)
    assert (found["prompts_truncated"], found["rows_too_long"], found["prompt_tokens_max"]) == (2, 0, 1020)
    assert any("2 rows whose prompt is too long and cut to fit" in line for line in found["lint"])
    assert _app.main(words, show=False) == 0
    assert "2 prompts were too long and cut to fit (prompt.on_overflow)" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["prompts_truncated"] == 2
    assert metrics["prompt_tokens"] == found["prompt_tokens"]
    assert {"preemptions", "recomputed_tokens"} <= set(metrics)


def test_without_a_way_to_cut_nothing_is(planned, words: list[str], tmp_path: Path) -> None:
    write(tmp_path, [{"prompt": "x" * 3000}])
    found = planned(words)
    assert (found["prompts_truncated"], found["rows_too_long"]) == (0, 1)

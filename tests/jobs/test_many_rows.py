"""A thousand real questions behind one long system prompt: all answered in order, the prefix computed once, memory flat."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT.parent / "shared" / "data" / "gsm8k" / "test_1000.jsonl"
SYSTEM = ROOT / "data" / "samples" / "system_prompt.txt"
MIB = 2**20


@pytest.mark.full
def test_a_thousand_questions_share_one_system_prompt(tmp_path):
    if not QUESTIONS.is_file():
        pytest.skip("the GSM8K questions beside the project are not here")
    with QUESTIONS.open(encoding="utf-8", newline="\n") as lines:
        rows = [json.loads(line) for line in lines]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "questions.parquet")

    few = run(tmp_path, name="few", limit=200)
    many = run(tmp_path, name="many", limit=1000)

    parts = sorted((tmp_path / "many").glob("part-*.arrow"))
    answers = pa.concat_tables(pyarrow.ipc.open_file(part).read_all() for part in parts)
    assert answers["question"].to_pylist() == [row["question"] for row in rows]
    assert set(answers["status"].to_pylist()) == {"ok"}

    num_prefix = min(answers["num_prompt_tokens"].to_pylist()) // 16 * 16  # at most: the shortest question is not nothing
    own = sum(answers["num_prompt_tokens"].to_pylist()) - len(rows) * shared_tokens(answers)
    assert many["computed_prompt_tokens"] <= 1.05 * (own + len(rows) * 16 + num_prefix)
    assert many["peak_rss_bytes"] - few["peak_rss_bytes"] < 200 * MIB


def shared_tokens(answers: pa.Table) -> int:
    """Tokens that all prompts begin with, read off the prompts themselves."""
    first, *others = answers["prompt_token_ids"].to_pylist()
    length = len(first)
    for ids in others:
        length = next((at for at in range(min(length, len(ids))) if ids[at] != first[at]), min(length, len(ids)))
    return length


def run(folder: Path, *, name: str, limit: int) -> dict:
    command = [
        *(sys.executable, "-m", "jobs", "run", "input=parquet", f"input.path={folder}/questions.parquet", f"output.path={folder}/{name}"),
        *("prompt.template='{{ question }}'", f"prompt.system_file={SYSTEM}", "sampling=greedy", "sampling.max_tokens=32"),
        *("kv_cache.memory=512MiB", "output.token_ids=true", f"limit={limit}"),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    metrics: dict = json.loads((folder / name / "metrics.json").read_text(encoding="utf-8"))
    return metrics

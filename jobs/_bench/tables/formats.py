"""What a KV format costs and saves: bytes, perplexity, and the speed of decoding over long contexts that nothing shares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jobs._bench.tables import MIB, Line, Row, Setup, Table
from jobs._schema import absolute
from pipeline import InputOptions
from pipeline.reader import open_reader

_BASE = "bf16"  # what sizes and speeds are compared with
_SCORED = ("fp32", "bf16", "int8", "fp8", "fp4")
_DECODED = ("bf16", "int8", "fp8")


def points(setup: Setup) -> Mapping[str, list[str]]:
    """Perplexity in float32, so that the format alone differs; decoding in bfloat16, all prompts computed in one step before it."""
    texts = setup.folder / "texts.jsonl"
    _write_texts(_source(setup.texts), texts, limit=setup.pick(None, 2))
    score = ["job=score", "input=jsonl", f"input.path={texts}", "prompt.on_overflow=truncate_right"]
    score += ["model.dtype=float32", "engine.max_num_seqs=6", "kv_cache.memory=1GiB"]
    num_rows, num_prompt, num_out = setup.pick((16, 1000, 64), (2, 40, 4))
    budget, num_blocks = num_rows * num_prompt, num_rows * -(-(num_prompt + num_out) // 16)
    decode = [f"bench.rows={num_rows}", f"bench.prompt_tokens={num_prompt}", "bench.shared_tokens=0", f"bench.max_tokens={num_out}"]
    decode += [f"engine.max_num_seqs={num_rows}", f"engine.max_num_batched_tokens={budget}", f"kv_cache.num_blocks={num_blocks}"]
    scored, decoded = setup.pick((_SCORED, _DECODED), (("fp32", "bf16", "int8"), ("bf16", "int8")))
    return {
        **{f"perplexity {name}": [*score, f"kv_cache.format={name}"] for name in scored},
        **{f"decode {name}": [*decode, "model.dtype=bfloat16", "kv_cache.block_size=16", f"kv_cache.format={name}"] for name in decoded},
    }


def rows(found: Mapping[str, Line]) -> list[Row]:
    """Percent of perplexity is against fp32."""
    exact, base = found["perplexity fp32"], found[f"decode {_BASE}"]
    return [
        {
            "format": name,
            "bytes a token": _token_bytes(line),
            "of bf16": _token_bytes(line) / _token_bytes(found[f"perplexity {_BASE}"]),
            "perplexity": line["perplexity"],
            "change": line["perplexity"] / exact["perplexity"] - 1,
            **_decoding(found.get(f"decode {name}"), base),
        }
        for name, line in ((name.removeprefix("perplexity "), line) for name, line in found.items() if name.startswith("perplexity "))
    ]


def _decoding(line: Line | None, base: Line) -> Row:
    """Nothing for a format that was not timed. The bytes are the whole pool, which is as large as the rows need."""
    if line is None:
        return dict.fromkeys(("decode tokens/s", "x bf16", "KV, MiB"))
    speed = line["decode_tokens_per_s"]
    return {"decode tokens/s": speed, "x bf16": speed / base["decode_tokens_per_s"], "KV, MiB": line["kv_bytes"] / MIB}


def _token_bytes(line: Line) -> float:
    return float(line["kv_bytes"] / line["kv_blocks_total"] / line["settings"]["kv_cache.block_size"])


def _source(name: str) -> Path:
    """Raises ValueError where there is no such file."""
    try:
        source = Path(absolute(name))
    except ValueError as refusal:
        raise ValueError(f"table.texts: {refusal}") from refusal
    if not source.is_file():
        raise ValueError(f"table.texts: there is no file {source}; name a JSONL file of rows with a prompt, one or more to a document")
    return source


def _write_texts(source: Path, target: Path, *, limit: int | None) -> None:
    """One prompt of each document, as rows for job=score; raises ValueError where there is none."""
    chosen: dict[str, str] = {}
    reader = open_reader(InputOptions(format="jsonl", path=str(source)), prompt_columns=("prompt",), limit=None)
    for shard in reader.read(reader.shards):
        for record in shard.records:
            if isinstance(text := record.columns.get("prompt"), str):
                chosen.setdefault(record.columns.get("document") or record.row_key, text)
    if not chosen:
        raise ValueError(f"table.texts: {source} has no row with a prompt")
    target.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in list(chosen.values())[:limit]), encoding="utf-8")


TABLE = Table(
    title="KV formats",
    read=(
        "Perplexity over the sample documents, computed in float32 so that only keys and values are rounded; then 16 sequences of 1,000 "
        "tokens that share nothing, decoding in bfloat16 on the fastest attention, with the pool that they take. "
        "What blocks that are not full yet take is in all sizes."
    ),
    columns={
        "format": "{}",
        "bytes a token": "{:,.0f}",
        "of bf16": "{:.1%}",
        "perplexity": "{:.4f}",
        "change": "{:+.3%}",
        "decode tokens/s": "{:,.0f}",
        "x bf16": "{:.2f}",
        "KV, MiB": "{:,.1f}",
    },
    plot="bytes a token",
    points=points,
    rows=rows,
)

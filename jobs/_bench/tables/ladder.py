"""From transformers' generate to the engine, one rung at a time: blocks, int8 blocks, attention that reads them where they lie."""

from __future__ import annotations

from collections.abc import Mapping

from jobs._bench.tables import GIB, MIB, Line, Row, Setup, Table, peak_bytes, run_s

_RUNGS = {
    "transformers generate": ["bench.answered_by=transformers"],
    "paged": ["engine.attention=sdpa", "kv_cache.format=bf16"],
    "+ int8 KV": ["engine.attention=sdpa", "kv_cache.format=int8"],
    "+ fused attention": ["engine.attention=auto", "kv_cache.format=int8"],
}


def points(setup: Setup) -> Mapping[str, list[str]]:
    shape = setup.pick(
        ["bench.rows=64", "bench.prompt_tokens=32-256", "bench.max_tokens=8-96", "engine.max_num_seqs=32"],
        ["bench.rows=4", "bench.prompt_tokens=8-32", "bench.max_tokens=2-8", "engine.max_num_seqs=2"],
    )
    return {rung: ["model.dtype=bfloat16", "bench.shared_tokens=0", *shape, *own] for rung, own in _RUNGS.items()}


def rows(found: Mapping[str, Line]) -> list[Row]:
    first = next(iter(found.values()))
    return [
        {
            "": rung,
            "attention": line["settings"]["engine.attention"],
            "tokens/s": line["generated_tokens_per_s"],
            "x transformers": line["generated_tokens_per_s"] / first["generated_tokens_per_s"],
            "first answer, s": line["first_row_s"] - line["load_s"],
            "half of them, s": line["answer_s_median"],
            "all, s": run_s(line),
            "peak memory, GiB": peak_bytes(line) / GIB,
            "KV at its peak, MiB": line["kv_bytes_peak"] / MIB,
        }
        for rung, line in found.items()
    ]


TABLE = Table(
    title="From transformers' generate to this engine",
    read=(
        "The same rows of mixed lengths in bfloat16, 32 at a time: transformers pads each batch to its longest prompt and answer, and "
        "begins the next when all of it is done; each line below adds one thing to the line above it."
    ),
    columns={
        "": "{}",
        "attention": "{}",
        "tokens/s": "{:,.0f}",
        "x transformers": "{:.1f}",
        "first answer, s": "{:.1f}",
        "half of them, s": "{:.1f}",
        "all, s": "{:.1f}",
        "peak memory, GiB": "{:.2f}",
        "KV at its peak, MiB": "{:,.1f}",
    },
    plot="tokens/s",
    points=points,
    rows=rows,
)

"""Batches that begin and end together against rows that come in as others are done."""

from __future__ import annotations

from collections.abc import Mapping

from jobs._bench.tables import Line, Row, Setup, Table, run_s


def points(setup: Setup) -> Mapping[str, list[str]]:
    shape = setup.pick(
        ["bench.rows=160", "bench.prompt_tokens=16-128", "bench.max_tokens=8-256", "engine.max_num_seqs=32"],
        ["bench.rows=12", "bench.prompt_tokens=8-16", "bench.max_tokens=2-24", "engine.max_num_seqs=4"],
    )
    ways = {"static": "true", "continuous": "false"}
    return {name: ["bench.shared_tokens=0", *shape, f"bench.static_batches={static}"] for name, static in ways.items()}


def rows(found: Mapping[str, Line]) -> list[Row]:
    return [
        {
            "": name,
            "steps": line["steps"],
            "sequences a step": line["batch_size_mean"],
            "tokens/s": line["generated_tokens_per_s"],
            "x static": line["generated_tokens_per_s"] / found["static"]["generated_tokens_per_s"],
            "half of the answers, s": line["answer_s_median"],
            "all, s": run_s(line),
        }
        for name, line in found.items()
    ]


TABLE = Table(
    title="Static against continuous batching",
    read=(
        "Answers of 8 to 256 tokens, 32 rows at most at a time, on the same kernels: a static batch waits for its longest answer before "
        "the next one begins. Rows that are done cost nothing here, so padded batches do worse."
    ),
    columns={
        "": "{}",
        "steps": "{:,}",
        "sequences a step": "{:.1f}",
        "tokens/s": "{:,.0f}",
        "x static": "{:.2f}",
        "half of the answers, s": "{:.1f}",
        "all, s": "{:.1f}",
    },
    plot="tokens/s",
    points=points,
    rows=rows,
)

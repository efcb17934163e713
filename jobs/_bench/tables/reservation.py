"""Blocks against one piece of ``max_model_len`` tokens for each sequence, in the same memory."""

from __future__ import annotations

from collections.abc import Mapping

from jobs._bench.tables import MIB, Line, Row, Setup, Table, run_s

_LENGTH = 1024  # the most that a block can hold: a sequence in a block of its own is the contiguous scheme


def points(setup: Setup) -> Mapping[str, list[str]]:
    """The contiguous scheme is the engine's own with blocks of ``max_model_len`` tokens, so that nothing else differs."""
    num_pieces = setup.pick(8, 2)
    shape = setup.pick(
        ["bench.rows=160", "bench.prompt_tokens=32-256", "bench.max_tokens=16-128"],
        ["bench.rows=24", "bench.prompt_tokens=100-150", "bench.max_tokens=4-40"],
    )
    shape += ["bench.shared_tokens=0", f"engine.max_model_len={_LENGTH}", "kv_cache.prefix_cache=false", "engine.max_num_seqs=64"]
    blocks = {"contiguous": (num_pieces, _LENGTH), "paged": (num_pieces * _LENGTH // 16, 16)}
    return {name: [*shape, f"kv_cache.num_blocks={num}", f"kv_cache.block_size={size}"] for name, (num, size) in blocks.items()}


def rows(found: Mapping[str, Line]) -> list[Row]:
    return [
        {
            "": name,
            "KV memory, MiB": line["kv_bytes"] / MIB,
            "slots in use": line["kv_utilisation_mean"],
            "sequences at once": line["batch_size_peak"],
            "on average": line["batch_size_mean"],
            "x contiguous": line["batch_size_mean"] / found["contiguous"]["batch_size_mean"],
            "computed again": line["recomputed_tokens"],
            "tokens/s": line["generated_tokens_per_s"],
            "all, s": run_s(line),
        }
        for name, line in found.items()
    ]


TABLE = Table(
    title=f"One piece of {_LENGTH:,} tokens for each sequence, or blocks of 16",
    read=(
        "Short rows of mixed lengths in the same memory, nothing shared: of the slots that running sequences hold, the share that stores a "
        "token, and how many sequences run. The average includes the run's end, when fewer are left than fit."
    ),
    columns={
        "": "{}",
        "KV memory, MiB": "{:,.1f}",
        "slots in use": "{:.1%}",
        "sequences at once": "{:,}",
        "on average": "{:.1f}",
        "x contiguous": "{:.1f}",
        "computed again": "{:,}",
        "tokens/s": "{:,.0f}",
        "all, s": "{:.1f}",
    },
    plot="on average",
    points=points,
    rows=rows,
)

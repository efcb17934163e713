"""N users behind one system prompt, with the prefix cache and without."""

from __future__ import annotations

from collections.abc import Mapping

from jobs._bench.tables import MIB, Line, Row, Setup, Table, run_s


def points(setup: Setup) -> Mapping[str, list[str]]:
    num_shared, num_own, num_out = setup.pick((600, 40, 16), (64, 8, 2))
    shape = [f"bench.prompt_tokens={num_shared + num_own}", f"bench.shared_tokens={num_shared}", f"bench.max_tokens={num_out}"]
    return {
        f"{num_users} users, {name}": [*shape, f"bench.rows={num_users}", f"kv_cache.prefix_cache={on}"]
        for num_users in setup.pick((1, 8, 32), (4,))
        for name, on in {"not cached": "false", "cached": "true"}.items()
    }


def rows(found: Mapping[str, Line]) -> list[Row]:
    """``x``: the seconds without the cache over these."""
    return [
        {
            "": name.replace("1 users", "1 user"),
            "prompt tokens": line["prompt_tokens"],
            "computed": line["computed_prompt_tokens"],
            "computed a user": line["computed_prompt_tokens"] / line["rows"],
            "KV at its peak, MiB": line["kv_bytes_peak"] / MIB,
            "all, s": run_s(line),
            "x not cached": run_s(found[f"{name.partition(',')[0]}, not cached"]) / run_s(line),
        }
        for name, line in found.items()
    ]


TABLE = Table(
    title="N users with one system prompt",
    read=(
        "Each user asks 40 tokens behind the same 600 and gets 16: with the cache the system prompt is computed and stored once, and what "
        "another user costs is their own tokens."
    ),
    columns={
        "": "{}",
        "prompt tokens": "{:,}",
        "computed": "{:,}",
        "computed a user": "{:,.1f}",
        "KV at its peak, MiB": "{:,.1f}",
        "all, s": "{:.2f}",
        "x not cached": "{:.1f}",
    },
    plot="all, s",
    points=points,
    rows=rows,
)

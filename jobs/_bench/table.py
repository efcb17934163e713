"""The figures of several points as text: what they have in common above, a Markdown table below, a row for each point.

Formats what is there; computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]

# Heading -> the cell of a point's JSON object.
_COLUMNS: dict[str, Callable[[Line], str]] = {
    "out/s": lambda line: f"{line['generated_tokens_per_s']:,.0f}",
    "best": lambda line: f"{line['generated_tokens_per_s_best']:,.0f}" if line["repeat"] > 1 else "",
    "prefill/s": lambda line: _rate(line["prefill_tokens_per_s"]),
    "decode/s": lambda line: _rate(line["decode_tokens_per_s"]),
    "cached": lambda line: f"{line['prefix_hit_rate']:.0%}",
    "run s": lambda line: f"{line['wall_s'] - line['load_s']:.1f}",
    "load s": lambda line: f"{line['load_s']:.1f}",
    "GiB": lambda line: f"{(line['peak_device_bytes'] or line['peak_rss_bytes']) / 2**30:.2f}",
    "of GEMM": lambda line: _share(line, "flops_share"),
    "of read": lambda line: _share(line, "read_share"),
    "of roof": lambda line: _share(line, "share"),
}


def table(lines: Sequence[Line]) -> str:
    """Markdown, padded so that it reads as plain text too, without columns that no point fills.

    ``lines`` are the JSON objects of the points.
    """
    measured = [line for line in lines if "error" not in line]
    swept = list(lines[0]["point"])
    columns = [heading for heading, cell in _COLUMNS.items() if not measured or any(cell(line) for line in measured)]
    rows = [[*swept, *columns]]
    for line in lines:
        figures = ["failed", *[""] * (len(columns) - 1)] if "error" in line else [_COLUMNS[heading](line) for heading in columns]
        rows.append([*(str(line["point"][key]) for key in swept), *figures])
    return "\n".join([*_head(measured), markdown(rows, num_left=len(swept))])


def markdown(rows: Sequence[Sequence[str]], *, num_left: int) -> str:
    """A table, padded; the first row is its head, and numbers stand on the right but for the first ``num_left`` columns."""
    widths = [max(3, *map(len, cells)) for cells in zip(*rows, strict=True)]
    rule = [f"{'-' * (width - 1)}{'-' if place < num_left else ':'}" for place, width in enumerate(widths)]
    return "\n".join(_row(row, widths, num_left=num_left) for row in [rows[0], rule, *rows[1:]])


def where(line: Line) -> str:
    """The machine and the code that a point was measured on."""
    machine = line["machine"]
    cpus = f"{machine['usable_cpus']} CPUs" + (f" ({machine['tier']})" if machine["tier"] else "")
    processor = machine["gpu"] or f"{machine['cpu']}, {cpus}"
    code = f"pagemill {line['version']}" + (f" at {line['revision']}{'+' if line['dirty'] else ''}" if line["revision"] else "")
    return f"{processor}, {machine['memory_bytes'] / 2**30:.0f} GiB; {code}, torch {line['torch']}"


def _row(cells: Sequence[str], widths: Sequence[int], *, num_left: int) -> str:
    padded = (
        cell.ljust(width) if place < num_left else cell.rjust(width) for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join(padded)} |"


def _head(lines: Sequence[Line]) -> Iterator[str]:
    """Machine, code, model and workload as far as they are the same for all points, and the machine's limits."""
    if not lines:
        return
    line = lines[0]
    yield where(line)
    common = [line[key] for key in ("model", "workload") if all(other[key] == line[key] for other in lines)]
    if common:
        yield "; ".join(common)
    roofs = [line["roof"] for line in lines if line["roof"]]
    if roofs:
        fastest: dict[str, float] = {}
        for roof in roofs:
            kind = roof["gemm"].partition(",")[0]
            fastest[kind] = max(roof["flops_per_s"], fastest.get(kind, 0.0))
        products = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s ({kind})" for kind, rate in fastest.items())
        yield f"the machine's limits: {products}, {max(roof['read_bytes_per_s'] for roof in roofs) / 1e9:.1f} GB/s read"
    yield ""


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _share(line: Line, key: str) -> str:
    return f"{line['roof'][key]:.0%}" if line["roof"] else ""

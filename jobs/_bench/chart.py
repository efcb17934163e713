"""Bars as an SVG file: one panel below the other, each with a scale of its own.

Draws numbers that it is given; needs no plotting library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _LABELS, _NUMBERS = 760, 190, 90  # of the picture, and beside the bars on the left and on the right
_HEAD, _BAR, _PITCH, _GAP = 28, 16, 22, 22  # a panel's title, a bar, from bar to bar, below a panel
_STYLE = "text{font:13px system-ui,sans-serif;fill:#222}.title{font-weight:600}.unit{fill:#666}.end{text-anchor:end}.bar{fill:#3b6ea8}"


class Panel(NamedTuple):
    """``bars``: label, number, and the number as text."""

    title: str
    unit: str
    bars: Sequence[tuple[str, float, str]]


def draw(panels: Sequence[Panel]) -> str:
    """The picture as text; each panel's longest bar is its largest number."""
    drawn: list[str] = []
    top = _GAP
    for panel in panels:
        drawn += _panel(panel, top=top)
        top += _HEAD + _PITCH * len(panel.bars) + _GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" role="img">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{top}" fill="#fff"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel, *, top: int) -> Iterator[str]:
    unit = f'<tspan class="unit">, {escape(panel.unit)}</tspan>'
    yield f'<text x="12" y="{top}"><tspan class="title">{escape(panel.title)}</tspan>{unit}</text>'
    largest = max((number for _, number, _ in panel.bars), default=0.0)
    for place, (label, number, text) in enumerate(panel.bars):
        y = top + _HEAD // 2 + place * _PITCH
        length = (_WIDTH - _LABELS - _NUMBERS) * (number / largest if largest else 0.0)
        yield f'<text class="end" x="{_LABELS - 8}" y="{y + _BAR - 3}">{escape(label)}</text>'
        yield f'<rect class="bar" x="{_LABELS}" y="{y}" width="{max(length, 1):.1f}" height="{_BAR}" rx="2"/>'
        yield f'<text x="{_LABELS + max(length, 1) + 6:.1f}" y="{y + _BAR - 3}">{escape(text)}</text>'

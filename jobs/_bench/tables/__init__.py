"""What a table of a page of measurements is: the points that it needs, and what their figures come to.

The modules here are the tables, by file name; how points are run and how a page is written is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Line = Mapping[str, Any]
Row = Mapping[str, Any]

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOptions:
    """A page of measurements: ``tables`` are modules in ``jobs/_bench/tables/``, in the page's order, none for no page.

    The page is written into the folder ``output``. ``quick`` takes sizes that show the machinery and nothing else; ``texts`` is a
    JSONL file whose prompts' perplexity is measured, one of those that share a ``document``.
    """

    title: str
    tables: tuple[str, ...] = ()
    output: str = "measured"
    quick: bool = False
    texts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What points are made for. ``folder`` is empty and stays until all are run; ``texts`` is as the user named it."""

    quick: bool
    texts: str
    folder: Path

    def pick(self, full: T, quick: T) -> T:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table.

    Attributes:
        read: how to read it, for people in a hurry.
        columns: heading -> format of its numbers, "{}" for text; texts come first, and the first one names the row.
        plot: the heading whose numbers are drawn.
        points: name -> the words that `pagemill bench` measures it with.
        rows: from the JSON object of each point, by name, to the rows; a row has a number, a text or None for each heading.
    """

    title: str
    read: str
    columns: Mapping[str, str]
    plot: str
    points: Callable[[Setup], Mapping[str, list[str]]]
    rows: Callable[[Mapping[str, Line]], list[Row]]


def run_s(line: Line) -> float:
    """Seconds from the moment that the model was ready to the last answer."""
    return float(line["wall_s"] - line["load_s"])


def peak_bytes(line: Line) -> int:
    """The most memory that the process had: the GPU's where there is one, else its resident set."""
    return int(line["peak_device_bytes"] or line["peak_rss_bytes"])

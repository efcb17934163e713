"""A page of tables: which points it needs, and what is written of their figures, as Markdown with a plot beside it.

Runs nothing; what the figures of a table come to is the table's business.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine import plugins
from jobs._bench import chart
from jobs._bench.table import markdown, where
from jobs._bench.tables import Line, Row, Setup, Table, TableOptions
from jobs._schema import absolute

_OWN_MODEL = "model.path"  # a table that needs another model than the user's names it
_PAGE, _PLOT = "MEASURED.md", "measured.svg"


class Page:
    """``points`` are the words of each point by its table's name and its own; in a point's JSON object they are ``point.table`` and
    ``point.point``."""

    def __init__(self, options: TableOptions, *, words: Sequence[str], folder: Path) -> None:
        """``words`` are the user's; ``folder`` is empty, and must stay until the points are run.

        Raises:
            ValueError: there is no such table, its texts are not there, or a table sets a key of ``words``.
        """
        self._options = options
        self._command = shlex.join(["pagemill", "bench", *words])
        self._tables: dict[str, Table] = {
            name: plugins.load("jobs._bench.tables", name, key="table.tables").TABLE for name in options.tables
        }
        self._output = Path(absolute(options.output))
        setup = Setup(quick=options.quick, texts=options.texts, folder=folder)
        base = [word for word in words if not word.startswith(("table=", "table."))]
        self.points = {
            (name, point): [*base, "bench.roof=false", *own]
            for name, table in self._tables.items()
            for point, own in table.points(setup).items()
        }
        given = {_key(word) for word in base} - {_OWN_MODEL}
        for (name, _), found in self.points.items():
            if taken := next((key for key in map(_key, found[len(base) :]) if key in given), None):
                raise ValueError(f"{taken}: the table {name} sets it itself; leave it out")

    def make_folder(self) -> None:
        """Make the folder for the page: after all else that may be refused, and before minutes of work.

        Raises:
            ValueError: it cannot be made.
        """
        try:
            self._output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"table.output: {self._options.output} cannot be made a folder ({error.strerror})") from error

    def write(self, lines: Sequence[Line]) -> Path:
        """Write the page of the points' JSON objects; returns its path. A table that lacks a point says so instead."""
        measured = [line for line in lines if "error" not in line]
        sections: list[str] = []
        panels: list[chart.Panel] = []
        for name, table in self._tables.items():
            found = {line["point"]["point"]: line for line in lines if line["point"]["table"] == name}
            failed = [f"{point} was not measured: {line['error']}" for point, line in found.items() if "error" in line]
            sections += [f"## {table.title}", "", table.read, "", *failed]
            if not failed:
                rows = table.rows(found)
                sections.append(markdown(_cells(table, rows), num_left=list(table.columns.values()).count("{}")))
                panels.append(_panel(table, rows))
            sections.append("")
        head = [f"# {self._options.title}", "", *_head(self._command, measured), ""]
        if self._options.quick:
            head += ["With table.quick the sizes are small ones, not those that are told below, and the figures mean nothing.", ""]
        if panels:
            head += [f"![The tables below as bars]({_PLOT})", ""]
            (self._output / _PLOT).write_text(chart.draw(panels), encoding="utf-8")
        page = self._output / _PAGE
        page.write_text("\n".join([*head, *sections]).rstrip("\n") + "\n", encoding="utf-8")
        return page


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _head(command: str, measured: Sequence[Line]) -> Iterator[str]:
    yield f"What `{command}` measured, each point in a process of its own"
    if measured:
        line = measured[0]
        yield f"({line['date'][:10]}; {where(line)}, transformers {line['transformers']}; {line['model']})."


def _cells(table: Table, rows: Sequence[Row]) -> list[list[str]]:
    """The headings, and each row's numbers as text."""
    for row in rows:
        assert list(row) == list(table.columns), "each row has every column"
    return [list(table.columns), *([_text(table, heading, value) for heading, value in row.items()] for row in rows)]


def _text(table: Table, heading: str, value: Any) -> str:
    return "" if value is None else table.columns[heading].format(value)


def _panel(table: Table, rows: Sequence[Row]) -> chart.Panel:
    label = next(iter(table.columns))
    drawn = ((str(row[label]), row[table.plot]) for row in rows if row[table.plot] is not None)
    return chart.Panel(table.title, table.plot, [(name, value, _text(table, table.plot, value)) for name, value in drawn])

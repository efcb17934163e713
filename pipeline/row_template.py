"""A user's Jinja template over a row's columns, in Jinja's sandbox: text out of columns.

Knows columns and their text; what becomes of the text it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from pipeline.types import RowError


class RowTemplate:
    """A Jinja template over a row's columns, in Jinja's sandbox.

    A column whose name is no identifier is reached as ``row["its name"]``. A null or unknown column that would be
    printed is an error, so the word None never gets into a prompt; write ``{{ context or "" }}`` to allow it. What an
    expression prints goes through ``change``, the template's own text does not.

    Attributes:
        names: every column that the template mentions by name, but for those that are also Jinja's (``range``), which a column
            of that name goes before.
        required: those of them that it does not test with ``is defined`` or give a ``default``.
        takes_all: it uses ``row``, which has every column.
    """

    def __init__(self, text: str, *, change: Callable[[str], str]) -> None:
        environment = SandboxedEnvironment(
            undefined=jinja2.StrictUndefined, finalize=lambda value: change(_printable(value)), autoescape=False
        )
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"prompt.template: line {error.lineno}: {error.message}") from error
        free = meta.find_undeclared_variables(tree)  # without Jinja's own names, which a column may have too
        self.takes_all = "row" in free
        self._own = {node.name for node in tree.find_all(nodes.Name)} & set(environment.globals)
        tested = [node.node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined")]
        guards = [*tested, *(node.node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d"))]
        guarded = {node.name for node in guards if isinstance(node, nodes.Name)}
        self.names = tuple(sorted(free - {"row"}))
        self.required = tuple(name for name in self.names if name not in guarded)

    def render(self, columns: Mapping[str, Any]) -> str:
        """Raises RowError ``template_error`` with Jinja's own message."""
        try:
            values = {name: columns[name] for name in (*self.names, *self._own) if name in columns}
            if self.takes_all:
                values["row"] = columns
            return self._template.render(values)
        except RowError:
            raise
        except Exception as error:  # a template is a user's program and may raise anything
            raise RowError("template_error", f"prompt.template: {str(error) or type(error).__name__}") from error


def _printable(value: Any) -> str:
    if value is None:
        raise RowError("template_error", 'prompt.template prints a null; write {{ name or "" }} where a column may be null')
    return text_of(value, name="prompt.template") if isinstance(value, bytes) else str(value)


def text_of(value: Any, *, name: str) -> str:
    """Text as it is; bytes (a binary Parquet column) are read as UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RowError("bad_row", f"{name}: the bytes are no UTF-8 text: {error}") from error
    if not isinstance(value, str):
        raise RowError("bad_row", f"{name}: {value!r} is no text")
    return value

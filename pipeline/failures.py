"""Rows that failed, by error code: how many, and the first few by name.

Counts what it is told of; knows neither why a row failed nor what becomes of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MAX_NAMED = 5  # row keys that are kept of those with one code


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Rows with one error code: how many, and the keys of the first few that were met."""

    num_rows: int
    first: tuple[str, ...]


@dataclass(slots=True)
class FailureTally:
    """Counts failed rows one by one.

    Attributes:
        num_rows: all of them, whatever their code.
    """

    num_rows: int = 0
    _by_code: dict[str, Failures] = field(default_factory=dict)

    def count(self, code: str, *, row_key: str) -> None:
        so_far = self._by_code.get(code, Failures(num_rows=0, first=()))
        named = so_far.first if len(so_far.first) == _MAX_NAMED else (*so_far.first, row_key)
        self._by_code[code] = Failures(num_rows=so_far.num_rows + 1, first=named)
        self.num_rows += 1

    def by_code(self) -> dict[str, Failures]:
        """Error code -> its rows, the commonest code first."""
        return dict(sorted(self._by_code.items(), key=lambda item: -item[1].num_rows))

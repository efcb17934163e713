"""What becomes of a prompt that is too long: the row's own texts are cut, the longest first, until the prompt fits.

Knows where a row holds texts and how to cut one between tokens; how a row becomes a prompt it is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.types import RowError

MODES = ("error", "truncate_left", "truncate_right", "truncate_middle")

# Columns that say how a row is answered, whatever else they are: cut, they say nothing.
_SETTINGS = ("tools", "sampling_params", "response_format")

_SLACK = 8  # so many tokens more than had to go are no matter

Row = Mapping[str, Any]
Build = Callable[[Row], list[int]]
Place = tuple[str | int, ...]  # where a text lies in a row: a column, then keys and positions inside its value


class Overflow:
    """Cuts prompts until ``max_model_len`` holds them with the answer's ``max_tokens``, or with one token where those are more.

    ``mode`` truncate_left takes tokens from a text's beginning, truncate_right from its end, truncate_middle from between
    its halves. What may be cut are the row's own texts: those of the prompt column, of the ``columns`` that a template
    names, or of a conversation's messages but for the system's; never the row's settings.
    A template's words, the system prompt and what the chat template puts around the turns stay whole, since the prompt is
    built anew from the row that was cut.

    Args:
        columns: what a prompt is built from; None is every column that the row has.
        messages_column: which of them holds conversations, and then ``prompt_token_ids`` holds ids; None for a template.
        token_ends: for each token of a text the place in the text just behind it.
    """

    def __init__(
        self,
        mode: str,
        *,
        columns: Sequence[str] | None,
        messages_column: str | None,
        token_ends: Callable[[str], Sequence[int]],
        max_model_len: int,
    ) -> None:
        assert mode in MODES[1:]
        self._mode = mode
        self._columns = columns
        self._messages_column = messages_column
        self._token_ends = token_ends
        self._max_model_len = max_model_len

    def fitted(self, ids: list[int], columns: Row, *, build: Build, max_tokens: int) -> list[int]:
        """``ids`` themselves where they fit; else ``build`` of the row with as little cut off as makes them fit.

        The longest text is cut first, and of each at least one token stays. A prompt that is too long all the same is left as
        it is. Since tokens merge where a text was cut, a few more may go than would have to.
        """
        limit = self._max_model_len - (max_tokens if max_tokens < self._max_model_len else 1)
        if len(ids) <= limit:
            return ids
        if self._messages_column is not None and columns.get("prompt_token_ids") is not None:
            found = self._cut_ids(ids, num_kept=limit)
        else:
            found = self._build_shorter(self._readable(columns), ids, build=build, limit=limit)
        return found if len(found) <= limit else ids

    def _cut_ids(self, ids: Sequence[int], *, num_kept: int) -> list[int]:
        head, tail = self._kept(num_kept)
        return [*ids[:head], *ids[len(ids) - tail :]]

    def _build_shorter(self, row: Row, ids: list[int], *, build: Build, limit: int) -> list[int]:
        for place in sorted(self._texts(row), key=lambda place: len(_text_at(row, place)), reverse=True):
            if len(ids) > limit:
                row, ids = self._shorten(row, ids, place=place, build=build, limit=limit)
        return ids

    def _shorten(self, row: Row, ids: list[int], *, place: Place, build: Build, limit: int) -> tuple[Row, list[int]]:
        """The row with the text at ``place`` cut as far as needed or possible, and its ids; unchanged where that is no help."""
        text = _text_at(row, place)
        ends = self._token_ends(text)

        def attempt(num_dropped: int) -> tuple[Row, list[int]]:
            shorter = _replaced(row, place, self._cut(text, ends, num_kept=len(ends) - num_dropped))
            try:
                return shorter, build(shorter)
            except Exception:  # the text was no plain text but, say, JSON that a template reads
                return row, ids

        best, step = (row, ids), len(ids) - limit
        low = high = 0  # tokens to drop: too few, and enough in the end
        while len(best[1]) > limit and high < len(ends) - 1:
            low, high = high, min(high + step, len(ends) - 1)
            found = attempt(high)
            helps = len(found[1]) < len(best[1])
            best, step = (found, len(found[1]) - limit) if helps else (best, 2 * step)
        while limit - len(best[1]) > _SLACK and high - low > 1:  # it is printed twice, or not to its end
            middle = (low + high) // 2
            found = attempt(middle)
            low, high, best = (low, middle, found) if len(found[1]) <= limit else (middle, high, best)
        return best

    def _cut(self, text: str, ends: Sequence[int], *, num_kept: int) -> str:
        head, tail = self._kept(num_kept)
        return (text[: ends[head - 1]] if head else "") + (text[ends[len(ends) - tail - 1] :] if tail else "")

    def _kept(self, num_kept: int) -> tuple[int, int]:
        """Of so many tokens, those that stay at the beginning and at the end."""
        if self._mode == "truncate_middle":
            return num_kept - num_kept // 2, num_kept // 2
        return (num_kept, 0) if self._mode == "truncate_right" else (0, num_kept)

    def _readable(self, columns: Row) -> dict[str, Any]:
        """The row without what it lacks or what cannot be read, bytes as text, a conversation as a list."""
        row: dict[str, Any] = {}
        for name in columns:
            try:
                value = columns[name]
                row[name] = value.decode("utf-8") if isinstance(value, bytes) else value
            except (RowError, UnicodeDecodeError):  # whoever needed it has failed before
                continue
        messages = self._messages_column
        if messages is not None and isinstance(row.get(messages), str):
            row[messages] = json.loads(row[messages])
        return row

    def _texts(self, row: Row) -> Iterator[Place]:
        """Where the texts are that may be cut."""
        for name in row if self._columns is None else self._columns:
            if name in _SETTINGS:
                continue
            if name == self._messages_column:
                yield from _contents(row.get(name) or [], column=name)
            else:
                yield from _texts_in(row.get(name), (name,))


def _contents(messages: Sequence[Mapping[str, Any]], *, column: str) -> Iterator[Place]:
    for index, message in enumerate(messages):
        if message["role"] != "system":
            yield from (place for place in _texts_in(message.get("content"), (column, index, "content")) if place[-1] != "type")


def _texts_in(value: Any, place: Place) -> Iterator[Place]:
    if isinstance(value, str):
        yield place
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts_in(item, (*place, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts_in(item, (*place, index))


def _text_at(row: Row, place: Place) -> str:
    value: Any = row
    for key in place:
        value = value[key]
    assert isinstance(value, str)
    return value


def _replaced(value: Any, place: Place, text: str) -> Any:
    """A copy of ``value`` with ``text`` at ``place``; what lies beside it is shared."""
    if not place:
        return text
    key, *rest = place
    if isinstance(value, Mapping):
        return {**value, key: _replaced(value[key], tuple(rest), text)}
    return [_replaced(item, tuple(rest), text) if index == key else item for index, item in enumerate(value)]

"""Which tokens one sequence has and how often its answer has each, kept up to date token by token.

Only rows with penalties have one; what a penalty makes of the numbers is not known here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class Tally:
    """Begins with a prompt, whose tokens the answer has 0 times.

    Attributes:
        token_ids: int64, each different token once.
        counts: int64, beside each how often the answer has it.
    """

    __slots__ = ("_places", "counts", "token_ids")

    def __init__(self, prompt: Iterable[int]) -> None:
        self.token_ids = array("q", dict.fromkeys(prompt))
        self.counts = array("q", [0]) * len(self.token_ids)
        self._places = {token_id: place for place, token_id in enumerate(self.token_ids)}

    def add(self, token_id: int) -> None:
        """The answer has one more token."""
        place = self._places.setdefault(token_id, len(self.token_ids))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(0)
        self.counts[place] += 1

    def fork(self) -> Tally:
        copy = Tally(())
        copy.token_ids, copy.counts, copy._places = self.token_ids[:], self.counts[:], dict(self._places)
        return copy

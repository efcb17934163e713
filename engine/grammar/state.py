"""How far one answer has come in its grammar: what may come next, and how it would end if it had to.

Depends on the answer's own tokens and its budget alone, so it survives preemption and says the same in every batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from engine.grammar.closing import Closer, completes
from engine.grammar.vocabulary import Spelling, TokenBytes

_EFFORT = 1024  # places to look at for a shorter ending, between two tokens


class Place(NamedTuple):
    """A place in a grammar; the matchers are never changed, a step copies them.

    ``tokens`` matches token ids and makes the masks, ``bytes`` matches bytes and finds endings. The best known ending is
    ``closing`` from byte ``start`` on.
    """

    tokens: LLMatcher
    bytes: LLMatcher
    closing: Spelling
    start: int

    @property
    def num_left(self) -> int:
        """Tokens of the best known ending, the end token included."""
        return self.closing.num_tokens[self.start] + 1


class Setting(NamedTuple):
    """What all answers of an engine share."""

    vocabulary: TokenBytes
    closer: Closer
    end_token_ids: tuple[int, ...]


class GrammarState:
    """One answer in a grammar, with ``budget`` tokens left to draw, the end token included.

    Invariant: the best known ending fits into the budget. A token may be drawn only where that stays true; when nothing is
    to spare, the ending's own next token is the only one.
    """

    __slots__ = ("_budget", "_looked", "_place", "_setting")

    def __init__(self, place: Place | None, *, budget: int, setting: Setting) -> None:
        assert place is None or place.num_left <= budget
        self._place = place  # None when the answer has ended
        self._budget = budget
        self._setting = setting
        self._looked: dict[int, Place | None] = {}  # the places after tokens that were asked about

    def allowed(self) -> NDArray[np.bool_]:
        """Bool [vocab_size]: the tokens that the grammar allows next, an end token where the answer may end.

        With nothing to spare only ``closing_token_id`` is true.
        """
        mask: NDArray[np.bool_] = np.zeros(len(self._setting.vocabulary.of), dtype=np.bool_)
        if self._place is None or self._place.num_left == self._budget:
            mask[self.closing_token_id] = True
            return mask
        # On a copy, since a matcher that meets a limit of the library stays broken.
        packed = np.frombuffer(self._place.tokens.deep_copy().compute_bitmask(), dtype=np.uint8)
        mask[:] = np.unpackbits(packed, count=len(mask), bitorder="little")
        return mask

    @property
    def closing_token_id(self) -> int:
        """The next token of the best known ending: it always fits."""
        if self._place is None or self._place.num_left == 1:
            return self._setting.end_token_ids[0]
        return self._place.closing.token_ids[self._place.start]

    def fits(self, token_id: int) -> bool:
        """Whether ``token_id`` may be drawn: the grammar allows it and an ending after it fits into the budget."""
        if self._place is None or token_id in self._setting.end_token_ids:
            return self._place is None or self._place.tokens.is_accepting()
        if token_id not in self._looked:
            self._looked[token_id] = self._after(self._place, token_id)
        return self._looked[token_id] is not None

    def advance(self, token_id: int) -> None:
        """Take the token that was drawn."""
        fits = self.fits(token_id)
        assert fits, "a token was drawn that the grammar rules out"
        self._place = self._looked.get(token_id)
        self._budget -= 1
        self._looked = {}

    def fork(self) -> GrammarState:
        """A state at the same place that goes its own way from here."""
        return GrammarState(self._place, budget=self._budget, setting=self._setting)

    def _after(self, place: Place, token_id: int) -> Place | None:
        """The place after ``token_id``; None where it is not legal or no ending is found that fits.

        The ending is looked for where it is cheapest: in the old one, in a guess, and in a search when there is no slack.
        """
        vocabulary, closer, _ = self._setting
        tokens, matcher = place.tokens.deep_copy(), place.bytes.deep_copy()
        text = vocabulary.of[token_id] if token_id < len(vocabulary.of) else b""
        if not text or tokens.try_consume_tokens([token_id]) != 1 or not matcher.consume_tokens(list(text)):
            return None
        budget = self._budget - 1
        closing, start = _carried(place, matcher, num_bytes=len(text)) or (closer.guess(matcher), 0)
        found = None if closing is None else Place(tokens, matcher, closing, start)
        if found is None or found.num_left > budget or found.num_left == budget > place.num_left - 1:
            closing = closer.search(matcher, effort=_EFFORT)
            if closing is not None and (found is None or closing.num_tokens[0] + 1 < found.num_left):
                found = Place(tokens, matcher, closing, 0)
        return found if found is not None and found.num_left <= budget else None


def _carried(place: Place, matcher: LLMatcher, *, num_bytes: int) -> tuple[Spelling, int] | None:
    """The old ending without as many of its first bytes as a token of ``num_bytes`` may have used up, where that is legal.

    A token inside a text uses up nothing, the ending's own next token its bytes, one with blanks in it something between.
    Where several are legal it is the shortest, so the ending's own next token always leaves one token less.
    """
    text, num_tokens = place.closing.text, place.closing.num_tokens
    starts = range(place.start, min(place.start + num_bytes, len(text)) + 1)
    for start in sorted(starts, key=num_tokens.__getitem__):
        if completes(matcher, text[start:]):
            return place.closing, start
    return None

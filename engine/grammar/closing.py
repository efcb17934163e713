"""The shortest way to end an answer legally from where it stands, found byte by byte over copies of a matcher.

Knows the grammar only through the matcher. The search looks where endings of JSON, choices and plain patterns are; it may
miss the very shortest of a contrived grammar, but what it finds is always legal.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from llguidance import LLMatcher

from engine.grammar.vocabulary import Spelling, TokenBytes

MAX_BYTES = 8192  # an ending longer than this is given up
_FEW = 16  # so many bytes or fewer are all tried, though they lead to the same place: their tokens differ
_FREE_TEXT = 64  # with more bytes allowed than this it is text, where brackets are letters and a quote may end it
_PATIENCE = 64  # how often in a row a guess takes the same byte in like places before it tries another
_ORDINARY = bytes(range(33, 127)).replace(b"\\", b"") + b" \n" + bytes(range(128, 256)) + b"\\"  # an escape never closes anything
_IN_TEXT = bytes(dict.fromkeys(b'"' + _ORDINARY))
_CLOSERS = b'}],:"0'
_BETWEEN = bytes(dict.fromkeys(_CLOSERS + _ORDINARY))


class Closer:
    """Finds endings: a guess that closes what is open, and a search that tries the other ways at each fork of the guess.

    Matchers here are over bytes: token id = byte.
    """

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._num_looks = 0
        self._allowed = lru_cache(8192)(self._in_order)
        self._fillers = lru_cache(256)(self._longest_first)

    def guess(self, matcher: LLMatcher) -> Spelling | None:
        """A legal ending, for JSON mostly a shortest one; None where none is found."""
        self._num_looks = 0
        return self._spell(b"", matcher)

    def search(self, matcher: LLMatcher, *, effort: int) -> Spelling | None:
        """The ending with the fewest tokens among those that leave the best known one at one fork after the other.

        It keeps what it has when it has looked at ``effort`` places.
        """
        self._num_looks = 0
        best = self._spell(b"", matcher)
        path = b""
        while not matcher.is_accepting() and self._num_looks < effort:
            ways = self._ways(matcher)
            for way, successor in ways if len(ways) > 1 else ():
                limit = MAX_BYTES if best is None else 2 * len(best.text) + 16
                found = self._spell(path + way, successor, limit=limit)
                if found is not None and (best is None or _cost(found) < _cost(best)):
                    best = found
            if best is None:
                return None
            step = ways[0][0] if len(ways) == 1 else best.text[len(path) : len(path) + 1]
            onward = _after(matcher, step)
            if onward is None:
                break
            path, matcher = path + step, onward
        return best

    def _spell(self, path: bytes, matcher: LLMatcher, *, limit: int = MAX_BYTES) -> Spelling | None:
        rest = self._close(matcher, limit=limit)
        if rest is None:
            return None
        self._num_looks += len(path + rest) // 4  # what spelling costs beside matching
        return self._tokens.spell(path + rest)

    def _close(self, matcher: LLMatcher, *, limit: int) -> bytes | None:
        """Bytes up to the first place where the answer may end: each the first in the order of closing that is allowed.

        A byte that was taken too often in places where the same bytes were allowed is left out, which breaks loops. Where
        many bytes are allowed and none of them closes, the text has to be long, and long tokens fill it.
        """
        matcher = matcher.deep_copy()
        text = bytearray()
        taken: Counter[tuple[bytes, int]] = Counter()
        while not matcher.is_accepting():
            self._num_looks += 1
            step = matcher.compute_ff_bytes()
            if not step:
                mask = matcher.compute_bitmask()
                byte = next((byte for byte in self._allowed(mask) if taken[mask, byte] < _PATIENCE), None)
                if byte is None:
                    return None
                taken[mask, byte] += 1
                step = bytes((byte,))
                if byte not in _CLOSERS:
                    step = next((filler for filler in self._fillers(mask) if _may_follow(matcher, filler)), step)
            text += step
            if len(text) > limit or not matcher.consume_tokens(list(step)):
                return None
        return bytes(text)

    def _ways(self, matcher: LLMatcher) -> list[tuple[bytes, LLMatcher]]:
        """What may follow and where it leads: of many bytes one for all those after which the same bytes may follow."""
        forced = matcher.compute_ff_bytes()
        steps = [forced] if forced else [bytes((byte,)) for byte in self._allowed(matcher.compute_bitmask())]
        self._num_looks += len(steps)
        ways = [(step, place) for step in steps if (place := _after(matcher, step)) is not None]
        if len(ways) <= _FEW:
            return ways
        alike = {(place.is_accepting(), place.compute_bitmask(), place.compute_ff_bytes()): (step, place) for step, place in reversed(ways)}
        return list(reversed(alike.values()))

    def _longest_first(self, mask: bytes) -> list[bytes]:
        """Tokens of nothing but bytes that ``mask`` allows, one for each length; none where it allows few."""
        allowed = bytes(self._allowed(mask)).replace(b"\\", b"")
        return self._tokens.made_of(allowed) if len(allowed) > _FEW else []

    def _in_order(self, mask: bytes) -> list[int]:
        """The bytes of ``mask`` that are tokens by themselves, best first."""
        bits = int.from_bytes(mask[:32], "little") & self._tokens.alone
        order = _IN_TEXT if bits.bit_count() > _FREE_TEXT else _BETWEEN
        return [byte for byte in order if bits >> byte & 1]


def completes(matcher: LLMatcher, text: bytes) -> bool:
    """Whether ``text`` may follow and end the answer."""
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(list(text)) == len(text) and copy.is_accepting()


def _may_follow(matcher: LLMatcher, text: bytes) -> bool:
    return matcher.validate_tokens(list(text)) == len(text)


def _after(matcher: LLMatcher, text: bytes) -> LLMatcher | None:
    """None where the library meets one of its limits."""
    copy = matcher.deep_copy()
    return copy if copy.consume_tokens(list(text)) else None


def _cost(spelling: Spelling) -> tuple[int, int]:
    return spelling.num_tokens[0], len(spelling.text)

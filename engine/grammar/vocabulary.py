"""The bytes of a vocabulary's tokens, and the fewest tokens that spell a text.

Knows no grammar; it is made once an engine, when the first grammar comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer

_NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Spelling:
    """A text in the fewest tokens, from each of its bytes on.

    ``num_tokens[i]`` tokens spell ``text[i:]`` and the first of them is ``token_ids[i]``; both have an entry for every byte,
    and ``num_tokens`` a last 0 for the end.
    """

    text: bytes
    num_tokens: Sequence[int]
    token_ids: Sequence[int]


class TokenBytes:
    """``of[id]`` are the bytes of each token below ``vocab_size``; empty for control tokens, which no grammar's text holds.

    ``alone`` has bit ``b`` set where the byte ``b`` is a token by itself.
    """

    def __init__(self, tokenizer: LLTokenizer, *, vocab_size: int) -> None:
        self.of: list[bytes] = [b"" if tokenizer.is_special_token(id_) else tokenizer.decode_bytes([id_]) for id_ in range(vocab_size)]
        self._ids: Mapping[bytes, int] = {text: id_ for id_, text in reversed(list(enumerate(self.of))) if text}
        self._longest: dict[bytes, int] = {}  # two first bytes -> length of the longest token that begins so
        for text in self._ids:
            self._longest[text[:2]] = max(len(text), self._longest.get(text[:2], 1))
        self.alone = sum(1 << text[0] for text in self._ids if len(text) == 1)

    def made_of(self, allowed: bytes) -> list[bytes]:
        """The texts of tokens that hold no byte but those of ``allowed``: one for each length, the longest first."""
        by_length = {len(text): text for text in self._ids if not text.strip(allowed)}
        return [by_length[length] for length in sorted(by_length, reverse=True)]

    def spell(self, text: bytes) -> Spelling | None:
        """The fewest tokens that spell ``text`` (dynamic programming from its end), or None where none do."""
        num_tokens = [_NEVER] * len(text) + [0]
        token_ids = [0] * len(text)
        for start in reversed(range(len(text))):
            longest = self._longest.get(text[start : start + 2], 1)
            for stop in range(start + 1, min(start + longest, len(text)) + 1):
                if num_tokens[stop] + 1 < num_tokens[start] and (id_ := self._ids.get(text[start:stop])) is not None:
                    num_tokens[start], token_ids[start] = num_tokens[stop] + 1, id_
        return Spelling(text, num_tokens, token_ids) if num_tokens[0] < _NEVER else None

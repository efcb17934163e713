"""What a request's settings mean for one vocabulary: which tokens end it, which texts do, which token runs may not appear.

Made once a request from its SamplingParams and the tokenizer; scheduler and sampler read it, it decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.sampling_params import SamplingParams


class Decoder(Protocol):
    """Decodes one answer as its tokens come."""

    text: str

    def add(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Vocabulary(Protocol):
    """What the host side needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def control_token_id(self, text: str) -> int | None:
        """The id of the control word that ``text`` is, if it is one."""
        ...

    def incremental_decoder(self, *, skip_special_tokens: bool) -> Decoder: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """A request's rules in token ids.

    Attributes:
        end_reasons: token id that ends the answer -> its stop reason: the id itself, or the stop text that it spells.
        stop: stop texts to look for in the decoded answer.
        bad_words: runs of token ids that may not be completed.
    """

    end_reasons: Mapping[int, int | str] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, sampling: SamplingParams, *, eos_token_ids: Collection[int], vocabulary: Vocabulary | None) -> Rules:
        """Raises ValueError where texts are given but the engine has no tokenizer to read them with."""
        end_reasons: dict[int, int | str] = {} if sampling.ignore_eos else {token_id: token_id for token_id in eos_token_ids}
        end_reasons |= {token_id: token_id for token_id in sampling.stop_token_ids}
        if not sampling.stop and not sampling.bad_words:
            return cls(end_reasons)
        if vocabulary is None:
            raise ValueError("sampling.stop and sampling.bad_words: this engine has no tokenizer; use stop_token_ids")
        # A stop text that is a control word may never show up in the text, so it is met as a token.
        control = {text: vocabulary.control_token_id(text) for text in sampling.stop}
        for text, token_id in control.items():
            if token_id is not None:
                end_reasons.setdefault(token_id, text)
        bad_words = dict.fromkeys(run for word in sampling.bad_words for run in _spellings(word, vocabulary))
        return cls(end_reasons, sampling.stop, tuple(bad_words))


def _spellings(word: str, vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """The token runs that write ``word``: inside a text and, where that begins with another token, after a blank."""
    bare = word.lstrip(" ")
    inside = tuple(vocabulary.encode(bare, add_special_tokens=False))
    after_blank = tuple(vocabulary.encode(f" {bare}", add_special_tokens=False))
    if not inside:  # nothing but blanks
        return [after_blank] if after_blank else []
    starts_anew = len(after_blank) == len(inside) and after_blank[0] != inside[0]
    return [inside, after_blank] if starts_anew else [inside]

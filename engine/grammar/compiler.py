"""Grammars made ready for one vocabulary: each is compiled once, whoever asks for it, and its shortest answer is found.

Owns the library's tokenizers; it keeps no request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.grammar.closing import MAX_BYTES, Closer
from engine.grammar.spec import Grammar, GrammarError
from engine.grammar.state import GrammarState, Place, Setting
from engine.grammar.vocabulary import TokenBytes
from engine.sampling_params import SamplingParams

_MAX_COMPILED = 256
_EFFORT = 8192  # places to look at for the shortest answer, once for a grammar
# Between two parts of JSON: nothing, a blank, or a line's end with its indentation; once, so that blanks never run on.
_JSON_WHITESPACE = r"( |\n {0,20})?"


class Tokenizer(Protocol):
    """What a grammar needs of a tokenizer."""

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def to_json(self) -> str:
        """The content of its tokenizer.json."""
        ...


class Grammars:
    """The grammars of one engine, the last few hundred of them compiled.

    Tokens from ``vocab_size`` on are never drawn.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def start(self, grammar: Grammar, *, sampling: SamplingParams, budget: int) -> GrammarState:
        """The state of an answer that has no token yet and may have ``budget``, its end token included.

        Raises:
            GrammarError: the grammar does not compile, the budget is under its shortest answer, or the settings forbid to
                end where the grammar does.
        """
        if sampling.ignore_eos or sampling.min_tokens > 0:
            key = "ignore_eos" if sampling.ignore_eos else "min_tokens"
            raise GrammarError(f"sampling.{key}: an answer in a given form ends where the form does; leave it out")
        if sampling.uses_beams:
            raise GrammarError("sampling.num_beams: a beam search keeps to no form; draw samples instead")
        place = self._compiled(grammar)
        if isinstance(place, str):
            raise GrammarError(place)
        if place.num_left > budget:
            source = f"sampling.max_tokens is {budget}" if budget == sampling.max_tokens else f"the context leaves {budget}"
            raise GrammarError(f"the shortest answer in this form has {place.num_left} tokens with its end token, {source}")
        return GrammarState(place, budget=budget, setting=self._setting)

    def _compile(self, grammar: Grammar) -> Place | str:
        """Where every answer begins, or why there is none: as a value, so that a grammar that fails is not tried for each row."""
        text = _library_grammar(grammar)
        tokens = LLMatcher(self._library_tokenizer, text, log_level=0)
        if tokens.is_error():
            return f"the {grammar.kind} does not compile: {tokens.get_error()}"
        matcher = LLMatcher(_byte_tokenizer(), text, log_level=0)
        closing = self._setting.closer.search(matcher, effort=_EFFORT)
        if closing is None:
            return f"the {grammar.kind} allows no answer of up to {MAX_BYTES} bytes in this model's vocabulary"
        return Place(tokens, matcher, closing, 0)

    @cached_property
    def _library_tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.to_json(), eos_token=list(self._tokenizer.eos_token_ids))

    @cached_property
    def _setting(self) -> Setting:
        if not self._tokenizer.eos_token_ids:
            raise GrammarError("this model has no end token, which an answer in a given form ends with")
        vocabulary = TokenBytes(self._library_tokenizer, vocab_size=min(self._vocab_size, self._library_tokenizer.vocab_size))
        return Setting(vocabulary, Closer(vocabulary), tuple(self._tokenizer.eos_token_ids))


def check_grammar(grammar: Grammar) -> None:
    """Compile ``grammar`` over bytes, which needs no model.

    Raises:
        GrammarError: it does not compile, so no row could be answered in it.
    """
    matcher = LLMatcher(_byte_tokenizer(), _library_grammar(grammar), log_level=0)
    if matcher.is_error():
        raise GrammarError(f"the {grammar.kind} does not compile: {matcher.get_error()}")


def _library_grammar(grammar: Grammar) -> str:
    """llguidance's own notation; what it does not know is refused when it is compiled."""
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in json.loads(grammar.text)))
    schema = '{"type": "object"}' if grammar.kind == "json_object" else grammar.text
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _JSON_WHITESPACE})


class _Bytes:
    """A vocabulary of the 256 bytes and an end token, as llguidance asks for one."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = [*(bytes((byte,)) for byte in range(256)), b"<end>"]
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))

"""How one request draws its tokens and when it stops: the settings, their ranges and the messages for wrong ones.

Names and meaning follow vLLM's SamplingParams, beams Hugging Face's generate; what they do to logits is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from typing import Any

_MOST_SAMPLES, _MOST_TOP = 16_384, 1_024  # of one row, and beside one token: more would fill the memory
_FLOAT32_MAX = 2.0**128 - 2.0**104  # what is computed with a setting is computed in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's settings; the defaults ask for nothing but a plain draw.

    Samples and draws: ``n`` samples are drawn for the one prompt. ``temperature`` 0 is greedy (with n samples: n equal
    ones). ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 switch a filter off; a top_k over the vocabulary keeps all.
    ``seed`` None draws from the engine's seed and the request's id, so two requests never share noise by accident.

    Penalties: ``repetition_penalty`` counts prompt and answer (1 is off), ``presence_penalty`` and
    ``frequency_penalty`` the answer only (0 is off). ``logit_bias`` adds to the logits of token ids.
    ``allowed_token_ids`` are the only ones that may be drawn (None: all), ``bad_words`` never appear as they would be
    tokenised at a word's start or inside a text.

    Stopping: an end token, one of ``stop_token_ids`` or a text of ``stop`` ends the answer with "stop"; the earliest
    stop text wins, wherever token borders fall, and is left out unless ``include_stop_str_in_output``. Nothing but
    ``max_tokens`` and the context's end stops before ``min_tokens`` tokens. ``ignore_eos`` goes on past end tokens.

    ``logprobs`` asks for so many most likely tokens beside each drawn one, ``logprob_token_ids`` for those tokens instead.
    ``prompt_logprobs`` does the same for the prompt's tokens (0: their own probability only); with it ``max_tokens`` may
    be 0, which scores the prompt and draws nothing. ``skip_special_tokens`` leaves control words out of the text.

    Beams: ``num_beams`` over 1 searches for the answer of the highest score, which is the sum of its tokens' log
    probabilities / (number of tokens, end token included) ** ``length_penalty``; the ``n`` best come back, the best first.
    ``early_stopping`` says when to stop once there are ``num_beams`` finished answers: True at once, False when the best
    open beam would not beat the worst of them if it ended here, "never" when it could not with any further length.
    Penalties, biases and bans change the log probabilities without normalising them again. Beams draw nothing, so
    ``temperature`` must be 0, and end at tokens only, so ``stop`` must be empty.

    Raises:
        ValueError: a value is out of range; the message names the key.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        check = _Checker(self)
        check.real("temperature", low=0.0)
        check.real("top_p", low=0.0, high=1.0, low_open=True)
        check.real("min_p", low=0.0, high=1.0)
        check.real("repetition_penalty", low=0.0, low_open=True)
        check.real("presence_penalty", low=-2.0, high=2.0)
        check.real("frequency_penalty", low=-2.0, high=2.0)
        check.integer("n", low=1, high=_MOST_SAMPLES)
        check.integer("top_k", low=-1)
        check.integer("max_tokens", low=1 if self.prompt_logprobs is None else 0)
        check.integer("min_tokens", low=0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"sampling.min_tokens: {self.min_tokens} is over sampling.max_tokens ({self.max_tokens})")
        if self.max_tokens == 0 and self.n > 1:
            raise ValueError(f"sampling.n: {self.n} samples of an answer that sampling.max_tokens=0 rules out")
        if self.seed is not None:
            check.integer("seed")
        for key in ("logprobs", "prompt_logprobs"):
            if getattr(self, key) is not None:
                check.integer(key, low=0, high=_MOST_TOP)
        for key in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            check.flag(key)
        self._set("stop", check.texts("stop"))
        self._set("bad_words", check.texts("bad_words"))
        self._set("stop_token_ids", check.token_ids("stop_token_ids"))
        self._set("logprob_token_ids", check.token_ids("logprob_token_ids"))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", check.token_ids("allowed_token_ids"))
            if not self.allowed_token_ids:
                raise ValueError("sampling.allowed_token_ids: an empty list allows nothing; leave it out to allow all")
        self._set("logit_bias", check.bias("logit_bias"))
        self._check_beams(check)

    def _check_beams(self, check: _Checker) -> None:
        check.integer("num_beams", low=1)
        check.real("length_penalty", low=-10.0, high=10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'sampling.early_stopping: {self.early_stopping!r} is not true, false or "never"')
        if not self.uses_beams:
            return
        if not self.greedy:
            raise ValueError(f"sampling.temperature: {self.temperature:g} draws by chance, which beams do not; set it to 0 with num_beams")
        if self.n > self.num_beams:
            raise ValueError(f"sampling.n: {self.n} answers are more than sampling.num_beams ({self.num_beams})")
        if self.stop:
            raise ValueError("sampling.stop: beams end at tokens only; use stop_token_ids, or leave out num_beams")
        if self.max_tokens == 0:
            raise ValueError(f"sampling.num_beams: {self.num_beams} beams of an answer that sampling.max_tokens=0 rules out")

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether a token's logit depends on which tokens are there already."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def uses_beams(self) -> bool:
        return self.num_beams > 1

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, defaults: SamplingParams | None = None) -> SamplingParams:
        """Build from a row's ``sampling_params``; keys that are absent or None keep the value of ``defaults``.

        Raises:
            ValueError: an unknown key (the message lists the known ones) or a value out of range.
        """
        base = defaults or cls()
        known = {f.name: getattr(base, f.name) for f in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"sampling: unknown key {unknown[0]!r}; known keys are {', '.join(sorted(known))}")
        return cls(**(known | {key: value for key, value in values.items() if value is not None}))


class _Checker:
    """Range checks that name the key, so that a refused row tells its author what to change."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def real(self, key: str, *, low: float, high: float = math.inf, low_open: bool = False) -> None:
        value = getattr(self.params, key)
        if not _is_real(value) or not low <= value <= high or (low_open and value == low):
            bracket = "(" if low_open else "["
            raise ValueError(f"sampling.{key}: {value!r} is not a number in {bracket}{low:g}, {high:g}]")

    def integer(self, key: str, *, low: int | None = None, high: int | None = None) -> None:
        value = getattr(self.params, key)
        if not _is_integer(value) or (low is not None and value < low) or (high is not None and value > high):
            allowed = "" if low is None else f" from {low} up" if high is None else f" in {low}..{high}"
            raise ValueError(f"sampling.{key}: {value!r} is not an integer{allowed}")

    def flag(self, key: str) -> None:
        value = getattr(self.params, key)
        if not isinstance(value, bool):
            raise ValueError(f"sampling.{key}: {value!r} is not true or false")

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = getattr(self.params, key)
        if not _is_list(value) or not all(_is_integer(item) and 0 <= item < 2**31 for item in value):
            raise ValueError(f"sampling.{key}: {value!r} is not a list of token ids")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = getattr(self.params, key)
        value = (value,) if isinstance(value, str) else value
        if not _is_list(value) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"sampling.{key}: {value!r} is neither a text nor a list of texts")
        if "" in value:
            raise ValueError(f"sampling.{key}: an empty text is everywhere; take it out")
        if any("\ud800" <= character <= "\udfff" for item in value for character in item):
            raise ValueError(f"sampling.{key}: {value!r} has half of a surrogate pair (\\ud800 to \\udfff), which is no text")
        return tuple(value)

    def bias(self, key: str) -> dict[int, float]:
        """Token id -> bias; ids may be text, as JSON's keys are, and the whole may be pairs, as Arrow's maps are."""
        value = getattr(self.params, key)
        try:
            found = {int(token_id): bias for token_id, bias in dict(value).items()}
        except (AttributeError, TypeError, ValueError, OverflowError):
            found = {-1: math.nan}
        if not all(token_id >= 0 and _is_real(bias) for token_id, bias in found.items()):
            raise ValueError(f"sampling.{key}: {value!r} does not map token ids to numbers")
        return {token_id: float(bias) for token_id, bias in found.items()}


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_FLOAT32_MAX <= value <= _FLOAT32_MAX


def _is_list(value: Any) -> bool:
    return isinstance(value, SequenceOf) and not isinstance(value, (str, bytes))

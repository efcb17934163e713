"""The values that cross the engine's border: what to generate, what one step does, what came out.

Knows nothing of tensors, blocks or files: everything here is ints, floats, strings and tuples of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from engine.sequence import Sequence

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request draws its tokens; names and meaning follow vLLM's SamplingParams.

    ``n`` samples are drawn for the one prompt. temperature 0 is greedy (with n samples: n equal ones). ``top_k`` 0 or -1,
    ``top_p`` 1 and ``min_p`` 0 switch a filter off. ``seed`` None draws from the engine's seed and the request's id, so
    two requests never share noise by accident.

    Raises:
        ValueError: a value is out of range; the message names the key.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check = _Checker(self)
        check.real("temperature", low=0.0)
        check.real("top_p", low=0.0, high=1.0, low_open=True)
        check.real("min_p", low=0.0, high=1.0)
        check.integer("top_k", low=-1)
        check.integer("max_tokens", low=1)
        check.integer("n", low=1)
        if self.seed is not None:
            check.integer("seed")
        check.flag("ignore_eos")
        object.__setattr__(self, "stop_token_ids", check.token_ids("stop_token_ids"))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, defaults: SamplingParams | None = None) -> SamplingParams:
        """Build from a row's ``sampling_params``; keys that are absent or None keep the value of ``defaults``.

        Raises:
            ValueError: an unknown key (the message lists the known ones) or a value out of range.
        """
        known: dict[str, Any] = {f.name: getattr(defaults, f.name) if defaults else f.default for f in fields(cls)}
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
        right_type = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not right_type or math.isnan(value) or math.isinf(value) or not low <= value <= high or (low_open and value == low):
            bracket = "(" if low_open else "["
            raise ValueError(f"sampling.{key}: {value!r} is not a number in {bracket}{low:g}, {high:g}]")

    def integer(self, key: str, *, low: int | None = None) -> None:
        value = getattr(self.params, key)
        if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
            raise ValueError(f"sampling.{key}: {value!r} is not an integer" + ("" if low is None else f" from {low} up"))

    def flag(self, key: str) -> None:
        value = getattr(self.params, key)
        if not isinstance(value, bool):
            raise ValueError(f"sampling.{key}: {value!r} is not true or false")

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = getattr(self.params, key)
        if isinstance(value, (str, bytes)) or not isinstance(value, SequenceOf):
            raise ValueError(f"sampling.{key}: {value!r} is not a list of token ids")
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
            raise ValueError(f"sampling.{key}: {value!r} is not a list of token ids")
        return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to answer. ``id`` names it in the completion and, without a sampling seed, keys its draws."""

    id: str | int
    prompt_token_ids: SequenceOf[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one sample of a request; a request that fails gives one with ``sample_index`` 0, whatever n is.

    ``token_ids`` includes the token that ended it. ``logprobs`` has one natural-log probability a token, taken from the
    model's plain distribution (before temperature and filters). ``stop_reason`` is the stop token's id, ``"context"``
    where the context's end cut the answer, else None. With ``finish_reason`` "error" the code and the message say why.
    """

    request_id: str | int
    sample_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None

    @property
    def cumulative_logprob(self) -> float:
        return math.fsum(self.logprobs)


class Chunk(NamedTuple):
    """``num_tokens`` tokens of one sequence from position ``start`` on; ``samples`` where the last one draws a token."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the device does in one step: ``copies`` of whole blocks (from, to) before anything is written, then the chunks.

    Decodes (one pending token) come first. A chunk that samples draws ``seq.num_draws`` tokens from its last logits.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampling(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.samples]


class Draw(NamedTuple):
    """One drawn token and its natural-log probability under the model's plain distribution."""

    token_id: int
    logprob: float

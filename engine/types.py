"""The values that cross the engine's border: what to generate, what one step does, what came out.

Knows nothing of tensors, blocks or files: everything here is ints, floats, strings and tuples of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine.grammar.spec import Grammar
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.sequence import Sequence

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to answer. ``id`` names it in the completion and, without a sampling seed, keys its draws.

    With a ``grammar`` every answer keeps to it and ends, by its end token, within ``sampling.max_tokens`` and the context.
    """

    id: str | int
    prompt_token_ids: SequenceOf[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What became of one sample of a request; a request that fails gives one with ``sample_index`` 0, whatever n is.

    ``token_ids`` includes the token that ended it, ``text`` does not; it is None where the engine has no tokenizer.
    ``logprobs`` has one natural-log probability a token, taken from the model's plain distribution (before penalties,
    temperature and filters), ``top_logprobs`` a token's (id, log probability) pairs that were asked for.
    ``prompt_logprobs`` begins at the second prompt token: the first has no probability. ``stop_reason`` is the stop
    token's id, the stop text, ``"context"`` where the context's end cut the answer, else None. With ``finish_reason``
    "error" the code and the message say why. ``beam_score`` is what beams are ranked by, None without beams.
    """

    request_id: str | int
    sample_index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str | None = None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    prompt_logprobs: tuple[float, ...] | None = None
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    beam_score: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None

    @property
    def cumulative_logprob(self) -> float:
        return math.fsum(self.logprobs)


class Chunk(NamedTuple):
    """``num_tokens`` tokens of one sequence from position ``start`` on.

    ``samples`` where the last one draws ``seq.num_draws`` tokens; ``scores`` are the positions of the prompt tokens whose
    probability is wanted, each read off the logits of the position before it.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    scores: range = range(0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the device does in one step: ``loads`` of saved content into blocks, ``copies`` of whole blocks (from, to), then the chunks.

    Decodes (one pending token) come first.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    loads: tuple[tuple[int, bytes], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampling(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.samples]


class WorkerLost(RuntimeError):
    """One of the processes that share the model is gone or does not answer, so the engine can compute nothing any more."""


# Instead of a drawn token's id: the logits were not numbers, or the row's own rules left nothing to draw.
NOT_A_NUMBER = -1
NOTHING_LEFT = -2


class Draw(NamedTuple):
    """One token, drawn or scored, and its natural-log probability under the model's plain distribution.

    ``top`` has the (token id, log probability) pairs that the request asked for beside it. A beam's candidate has in
    ``adjusted_logprob`` what penalties, biases and bans make of its log probability.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    adjusted_logprob: float = 0.0

"""One sample of a request in flight: its tokens, how many of them the cache holds, and which blocks hold them.

The only mutable thing that the scheduler and the KV cache share; it makes no decision of its own.
"""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING

from engine.rules import Rules
from engine.tally import Tally
from engine.types import Draw, Request

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState
    from engine.kv.radix import Node
    from engine.scheduler.beams import Beams
    from engine.scheduler.stopping import TextWatch


class Sequence:
    """Invariant (I2): ``0 <= num_computed < len(tokens)`` while it lives: there is always a token to compute.

    Attributes:
        tokens: int32 prompt and output token ids, in order.
        num_computed: leading tokens whose keys and values are in ``blocks``.
        num_unknown: tokens after those, 0 or 1, that are drawn on the device while the host does not know them.
        blocks: block ids in position order; token ``p`` lies in ``blocks[p // block_size]``.
        nodes: radix nodes of the leading blocks that are published; ``nodes[i].block == blocks[i]``.
        max_len: most tokens it may grow to, prompt included.
        rules: what ends it and what may not appear, in token ids.
        watch: looks for stop texts in its answer; None where there are none.
        submitted_s: when the request came, on the clock of ``time.perf_counter``.
        sample_index: which of the request's ``n`` samples it is; the first one computes the prompt and forks the others.
        grammar: what may come next where the answer has a given form; None where it is free.
        beams: the search that it is a beam of; None for a plain sample.
        tally: which tokens it has and how often, where there are penalties.
        draws: whether anything is to be drawn at all, or the prompt is only scored.
        scores_prompt: whether the prompt's own probabilities are wanted.
    """

    __slots__ = (
        "beams",
        "blocks",
        "draws",
        "grammar",
        "logprobs",
        "max_len",
        "nodes",
        "num_cached",
        "num_computed",
        "num_lost",
        "num_prompt",
        "num_unknown",
        "prompt_scores",
        "request",
        "rules",
        "sample_index",
        "scores_prompt",
        "submitted_s",
        "tally",
        "tokens",
        "top_logprobs",
        "watch",
    )

    def __init__(
        self, request: Request, *, max_len: int, rules: Rules | None = None, watch: TextWatch | None = None, sample_index: int = 0
    ) -> None:
        self.request = request
        self.rules = rules or Rules()
        self.watch = watch
        self.sample_index = sample_index
        self.submitted_s = time.perf_counter()
        self.beams: Beams | None = None
        self.grammar: GrammarState | None = None
        self.tokens = array("i", request.prompt_token_ids)
        self.tally = Tally(self.tokens) if request.sampling.penalises else None
        self.num_prompt = len(self.tokens)
        self.max_len = max_len
        self.draws = request.sampling.max_tokens > 0
        self.scores_prompt = request.sampling.prompt_logprobs is not None
        self.num_computed = 0
        self.num_unknown = 0
        self.num_cached: int | None = None  # prompt tokens found in the cache at the first admission
        self.num_lost = 0  # computed tokens whose blocks it had to give up
        self.blocks: list[int] = []
        self.nodes: list[Node] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.prompt_scores: list[Draw] = []  # of the prompt's tokens from the second on, where they are asked for

    @property
    def num_pending(self) -> int:
        """Tokens left to compute before the next draw; a prompt that is only scored needs none for its last token."""
        return len(self.tokens) - self.num_computed - (not self.draws)

    def scores_in(self, start: int, num_tokens: int) -> range:
        """Positions of the prompt tokens that computing these tokens gives a probability for and that have none yet."""
        if not self.scores_prompt:
            return range(0)
        return range(len(self.prompt_scores) + 1, min(start + num_tokens + 1, self.num_prompt))

    @property
    def num_generated(self) -> int:
        return len(self.tokens) + self.num_unknown - self.num_prompt

    @property
    def num_draws(self) -> int:
        """Tokens to draw from this sequence's next logits: all samples of a request start from the prompt's.

        Of a beam that is its best candidates: if all its end tokens are among them, ``num_beams`` others are left.
        """
        sampling = self.request.sampling
        if sampling.uses_beams:
            return sampling.num_beams + len(self.rules.end_reasons)
        return sampling.n if self.num_generated == 0 else 1

    @property
    def num_places(self) -> int:
        """Places among the running sequences that it takes: a search keeps those of all its beams from the start."""
        sampling = self.request.sampling
        return sampling.num_beams if self.num_generated == 0 else 1

    @property
    def num_logprobs(self) -> int:
        """Most log probabilities of other tokens than the drawn ones that its request will hold until it is answered."""
        sampling = self.request.sampling
        num_answers = sampling.num_beams if sampling.uses_beams else sampling.n
        num_top = len(sampling.logprob_token_ids) or sampling.logprobs or 0
        return num_answers * (self.max_len - self.num_prompt) * num_top + self.num_prompt * (sampling.prompt_logprobs or 0)

    def fork(self, *, sample_index: int = 0, watch: TextWatch | None = None) -> Sequence:
        """A sample or a beam with the same tokens so far, which holds no blocks yet."""
        child = Sequence(self.request, max_len=self.max_len, rules=self.rules, watch=watch, sample_index=sample_index)
        child.tokens = self.tokens[:]
        child.tally = None if self.tally is None else self.tally.fork()
        child.logprobs = list(self.logprobs)
        child.top_logprobs = list(self.top_logprobs)
        child.prompt_scores = self.prompt_scores
        child.num_cached = self.num_cached
        child.submitted_s = self.submitted_s
        child.beams = self.beams
        child.grammar = None if self.grammar is None else self.grammar.fork()
        return child

    def append(self, draw: Draw) -> None:
        self.tokens.append(draw.token_id)
        self.logprobs.append(draw.logprob)
        if draw.top:
            self.top_logprobs.append(draw.top)
        if self.tally is not None:
            self.tally.add(draw.token_id)
        if self.grammar is not None:
            self.grammar.advance(draw.token_id)

    def begins_with(self, prefix: bytes) -> bool:
        """Whether its tokens, as int32 bytes, begin with ``prefix``."""
        return self.tokens[: len(prefix) // self.tokens.itemsize].tobytes() == prefix

    def block_key(self, index: int, block_size: int) -> bytes:
        """The bytes of the int32 tokens of full block ``index``: the edge label in the radix tree."""
        return self.tokens[index * block_size : (index + 1) * block_size].tobytes()

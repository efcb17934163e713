"""Whether a request can ever be served, and the sequence that it becomes.

Knows the engine's limits and its vocabulary; when a sequence runs is the scheduler's decision.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from engine.grammar.spec import GrammarError
from engine.rules import Rules, Vocabulary
from engine.sampling_params import SamplingParams
from engine.scheduler.answers import error
from engine.scheduler.beams import Beams
from engine.scheduler.stopping import TextWatch
from engine.sequence import Sequence
from engine.types import Completion, Request

if TYPE_CHECKING:
    from engine.grammar.compiler import Grammars


class Admission:
    """The limits of one engine.

    Args:
        num_blocks, block_size: the KV pool, which no sequence can outgrow.
        max_num_seqs: most sequences in flight.
        max_model_len: most tokens of a prompt and its answer.
        eos_token_ids: tokens that end an answer.
        vocab_size: token ids from here on are unknown to the model.
        vocabulary: reads stop texts; without one requests that have some are refused.
        grammars: compiles the forms that requests ask for; without them such requests are refused.

    Attributes:
        max_len: most tokens of a prompt and its answer: the model's limit or the pool's, whichever is less.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        vocab_size: int,
        vocabulary: Vocabulary | None,
        grammars: Grammars | None,
    ) -> None:
        self.max_len = min(max_model_len, num_blocks * block_size)
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._pool_is_the_limit = num_blocks * block_size < max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._rules: tuple[SamplingParams, Rules] | None = None  # of the request before: most rows have the job's settings

    def sequence(self, request: Request) -> Sequence | Completion:
        """The request as a sequence that waits, or the error completion that says why it can never be served."""
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            return error(request, "empty_prompt", "the prompt has no tokens; give it some text")
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self._vocab_size:
            return error(request, "bad_row", f"a prompt token id is not in 0..{self._vocab_size - 1}, the model's vocabulary")
        if num_tokens + min(1, request.sampling.max_tokens) > self.max_len:
            return error(request, "too_long", self._too_long(num_tokens))
        try:
            return self._sequence(request)
        except GrammarError as refusal:
            return error(request, "grammar_error", str(refusal))
        except ValueError as refusal:
            return error(request, "bad_params", str(refusal))

    def watch(self, request: Request, rules: Rules) -> TextWatch | None:
        """A fresh look-out for the request's stop texts, one for each sample; None where it has none."""
        if not rules.stop:
            return None
        assert self._vocabulary is not None, "Rules.of refuses texts without one"
        sampling = request.sampling
        decoder = self._vocabulary.incremental_decoder(skip_special_tokens=sampling.skip_special_tokens)
        return TextWatch(decoder, stop=rules.stop, include_stop=sampling.include_stop_str_in_output)

    def _sequence(self, request: Request) -> Sequence:
        """Raises ValueError where the request's settings do not go with this engine; the message names the key."""
        sampling = request.sampling
        if self._rules is None or self._rules[0] is not sampling:
            self._check_token_ids(sampling)
            self._rules = sampling, Rules.of(sampling, eos_token_ids=self._eos_token_ids, vocabulary=self._vocabulary)
        rules = self._rules[1]
        max_len = min(len(request.prompt_token_ids) + sampling.max_tokens, self.max_len)
        seq = Sequence(request, max_len=max_len, rules=rules, watch=self.watch(request, rules))
        if request.grammar is not None:
            if self._grammars is None:
                raise GrammarError("this engine has no tokenizer, which an answer in a given form needs")
            seq.grammar = self._grammars.start(request.grammar, sampling=sampling, budget=max_len - seq.num_prompt)
        if sampling.uses_beams:
            if seq.num_places > self._max_num_seqs:
                raise ValueError(f"sampling.num_beams: {sampling.num_beams} is over engine.max_num_seqs ({self._max_num_seqs})")
            if seq.num_draws > self._vocab_size:
                raise ValueError(
                    f"sampling.num_beams: {sampling.num_beams} beams choose among {seq.num_draws} tokens, the model has {self._vocab_size}"
                )
            seq.beams = Beams(seq)
        return seq

    def _check_token_ids(self, sampling: SamplingParams) -> None:
        """Raises ValueError where the settings name a token that the model lacks, which they would wait for or change in vain."""
        named: dict[str, Collection[int]] = {
            "allowed_token_ids": sampling.allowed_token_ids or (),
            "logit_bias": sampling.logit_bias,
            "logprob_token_ids": sampling.logprob_token_ids,
            "stop_token_ids": sampling.stop_token_ids,
        }
        for key, token_ids in named.items():
            if (last := max(token_ids, default=0)) >= self._vocab_size:
                raise ValueError(f"sampling.{key}: {last} is not in 0..{self._vocab_size - 1}, the model's vocabulary")

    def _too_long(self, num_tokens: int) -> str:
        if self._pool_is_the_limit:
            needed = -(-(num_tokens + 1) // self._block_size)
            return (
                f"the prompt has {num_tokens} tokens and needs {needed} KV blocks of {self._block_size}, "
                f"the pool has {self._num_blocks}; raise kv_cache.memory"
            )
        return (
            f"the prompt has {num_tokens} tokens and the context holds {self.max_len} with the answer; "
            "shorten it, or raise engine.max_model_len where the model allows"
        )

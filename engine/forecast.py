"""What an engine would make of requests, told without its model: which it refuses, what it computes, what memory it needs.

Admits exactly as the engine does; it runs nothing and loads no weights.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.kv.census import BlockCensus
from engine.scheduler.admission import Admission
from engine.sequence import Sequence
from engine.types import Completion, Request

if TYPE_CHECKING:
    from engine.config import EngineConfig, KVCacheConfig, ModelConfig
    from engine.kv.capacity import Capacity
    from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The KV pool: ``num_blocks`` blocks of ``block_size`` tokens and ``block_bytes`` bytes, over all layers.

    ``bytes_beside`` lie beside it for blocks that are not full.
    ``max_num_seqs`` sequences of ``max_len`` tokens at most, prompt and answer, are in flight at once.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    bytes_beside: int
    max_num_seqs: int
    max_len: int
    prefix_cache: bool

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.bytes_beside

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the requests that are admitted come to.

    Attributes:
        num_prompt_tokens: as metrics.json counts them, once a request whatever its ``n``.
        num_shared_tokens: those that the prefix cache serves in whole blocks where it keeps every one and a prompt comes
            before those that go on from it; 0 where it is off. In another order each prompt may lose a token. It serves more
            where the first tokens of a block are copied, and where some prompts are scored and others not.
        num_shareable_tokens: the same, were it on.
        num_sequence_tokens: prompts and the longest answers that they may get, each sample for itself.
        longest_sequence: most tokens of a prompt and its longest answer.
        num_sequences: samples (or beams) of all requests.
        num_cut: requests whose longest answer does not fit behind the prompt.
        num_repeated: requests that equal an earlier one but for the id.
        num_prompt_bytes: what every full block of the prompts that are not scored takes, equal ones once.
        num_needed_bytes: what the ``max_num_seqs`` largest sequences take at their full length, nothing shared; a pool of
            that size never has to preempt.
    """

    num_requests: int
    num_prompt_tokens: int
    num_shared_tokens: int
    num_shareable_tokens: int
    num_sequence_tokens: int
    longest_sequence: int
    num_sequences: int
    num_cut: int
    num_repeated: int
    num_prompt_bytes: int
    num_needed_bytes: int


class Forecast:
    """Takes requests as an engine does and counts what they come to, in memory that does not grow with their number."""

    def __init__(self, *, admission: Admission, pool: Pool) -> None:
        self.pool = pool
        self._admission = admission
        self._blocks = BlockCensus()
        self._requests = BlockCensus()
        self._largest: list[int] = []  # blocks of the largest sequences, a heap
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_sequence_tokens = 0
        self._longest_sequence = 0
        self._num_sequences = 0
        self._num_cut = 0

    @classmethod
    def capacity(cls, *, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig, num_bytes: int | None = None) -> Capacity:
        """How many sequences fit in a pool of ``num_bytes``, of any model that has a config.json, whether its kind is served or not.

        None: the bytes that the settings give the pool, else a safe share of what is free here with no weights loaded.

        Raises:
            ValueError: there is no such model, or its config does not tell the sizes; the message names the key.
        """
        from engine.build import capacity

        return capacity(model=model, engine=engine, kv_cache=kv_cache, num_bytes=num_bytes)

    @classmethod
    def from_config(
        cls, *, model: ModelConfig, engine: EngineConfig, kv_cache: KVCacheConfig, tokenizer: Tokenizer | None = None
    ) -> Forecast:
        """For the engine that ``Engine.from_config`` would build on this machine now.

        The size of a pool that the settings leave open is an estimate: the weights' share of the memory is reckoned, not loaded.

        Raises:
            ValueError: a setting cannot be served on this machine or by this model; the message names the key.
        """
        from engine.build import forecast

        return forecast(model=model, engine=engine, kv_cache=kv_cache, tokenizer=tokenizer)

    def submit(self, request: Request) -> Completion | None:
        """Count ``request``; what could never be served comes back as the engine's error completion and is not counted."""
        seq = self._admission.sequence(request)
        if isinstance(seq, Completion):
            return seq
        self._num_requests += 1
        self._requests.add([_identity(request)], num_matchable=1)
        if seq.num_pending:  # a prompt of one token that is only scored never gets to run
            self._num_prompt_tokens += seq.num_prompt
            self._count_blocks(seq)
            self._count_sequences(seq)
        return None

    def outlook(self) -> Outlook:
        """What was counted so far."""
        shareable = self._blocks.num_matched() * self.pool.block_size
        return Outlook(
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_shared_tokens=shareable if self.pool.prefix_cache else 0,
            num_shareable_tokens=shareable,
            num_sequence_tokens=self._num_sequence_tokens,
            longest_sequence=self._longest_sequence,
            num_sequences=self._num_sequences,
            num_cut=self._num_cut,
            num_repeated=self._requests.num_matched(),
            num_prompt_bytes=self._blocks.num_distinct() * self.pool.block_bytes,
            num_needed_bytes=sum(self._largest) * self.pool.block_bytes,
        )

    def _count_blocks(self, seq: Sequence) -> None:
        """A prompt publishes each block that it fills, and can match all but the one that holds its last token.

        One that is scored matches nothing. What it publishes counts as if it ran last, so beside it others match no less
        than is said here.
        """
        if not seq.scores_prompt:
            keys = (seq.block_key(index, self.pool.block_size) for index in range(seq.num_prompt // self.pool.block_size))
            self._blocks.add(keys, num_matchable=(seq.num_prompt - 1) // self.pool.block_size)

    def _count_sequences(self, seq: Sequence) -> None:
        sampling = seq.request.sampling
        copies = sampling.num_beams if sampling.uses_beams else sampling.n
        self._num_sequences += copies
        self._num_sequence_tokens += copies * seq.max_len
        self._longest_sequence = max(self._longest_sequence, seq.max_len)
        self._num_cut += seq.max_len < seq.num_prompt + sampling.max_tokens
        num_blocks = self.pool.blocks_for(seq.max_len)
        for _ in range(min(copies, self.pool.max_num_seqs)):
            if len(self._largest) < self.pool.max_num_seqs:
                heapq.heappush(self._largest, num_blocks)
            else:
                heapq.heappushpop(self._largest, num_blocks)


def _identity(request: Request) -> bytes:
    return repr((tuple(request.prompt_token_ids), request.sampling, request.grammar)).encode()

"""How many blocks the sequences in flight are still to take: all that they ever can, or as many as they are expected to.

Knows lengths and block counts; who is admitted, who waits and who gives way is the scheduler's decision.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from engine.kv.manager import BlockManager
from engine.sequence import Sequence

# While some grow others end, so what all are expected to grow by is never wanted at once. In simulations (answers of one
# length, lognormal, many short and few long; pools of 3 to 25 full sequences) more of it left places empty, and none of it
# made up to a third of the tokens be computed twice.
_SHARE_KEPT = 0.25


class Headroom:
    """What ``kv_cache.admission`` keeps free.

    ``safe`` reckons with each sequence at its full length, ``max_tokens`` and all: nobody ever has to give way.
    ``optimistic`` expects an answer to use the share of its ``max_tokens`` that those before it used on average, and keeps a
    part of what is then missing: more sequences run at once, and now and then one has to give way.

    Both count every sample and beam of a request, or as many of them as the pool and the places can ever hold at once; the
    others wait and start later. Answers do not depend on any of this, only the order in which they are made.
    """

    def __init__(self, kv: BlockManager, *, admission: str, max_num_seqs: int) -> None:
        self._kv = kv
        self._is_safe = admission == "safe"
        self._max_num_seqs = max_num_seqs
        self._num_answers = 1  # as if there had been one, as long as it may be
        self._share_sum = 1.0

    def learn(self, seq: Sequence) -> None:
        """``seq`` is an answer that has ended."""
        if seq.num_generated:
            self._num_answers += 1
            self._share_sum += seq.num_generated / (seq.max_len - seq.num_prompt)

    def to_come(self, running: Collection[Sequence]) -> int:
        """Blocks that ``running``, which is all that runs, is still to take."""
        return sum(map(self.of, running)) + self._kv.num_copies_due

    def of(self, seq: Sequence) -> int:
        """Blocks that ``seq`` is still to take, with those of the samples or beams that are to fork from it."""
        total = self._kv.blocks_for(self._length(seq))
        own = total - seq.num_prompt // self._kv.block_size  # the prompt's full blocks are everybody's
        return max(0, total - len(seq.blocks)) + (self._num_branches(seq, own) - 1) * own

    def has_room_for_fork(self, seq: Sequence, running: Collection[Sequence]) -> bool:
        """Whether one more sequence may go on from where ``seq`` is, and share its blocks."""
        if not self._is_safe:
            return True
        copies = seq.num_computed % self._kv.block_size > 0
        return self.to_come(running) + self.of(seq) + copies <= self._kv.num_available

    def _length(self, seq: Sequence) -> int:
        """Tokens that ``seq`` is reckoned to grow to; never fewer than another block of them."""
        if self._is_safe:
            return seq.max_len
        expected = (seq.max_len - seq.num_prompt) * self._share_sum / self._num_answers
        growth = max(self._kv.block_size, math.ceil(_SHARE_KEPT * (expected - seq.num_generated)))
        return min(seq.max_len, len(seq.tokens) + growth)

    def _num_branches(self, seq: Sequence, own: int) -> int:
        """Sequences that go on from ``seq``'s prompt, each with ``own`` blocks beside those that all share; one without forks."""
        sampling = seq.request.sampling
        asked = 1 if seq.num_generated else sampling.num_beams if sampling.uses_beams else sampling.n
        if asked == 1:
            return 1
        shared = seq.num_prompt // self._kv.block_size
        return min(asked, self._max_num_seqs, (self._kv.num_blocks - shared) // own)

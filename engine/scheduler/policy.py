"""The order in which waiting sequences are tried: resumed ones first, then by token prefix so that twins meet.

Owns the waiting queue and nothing else; whether a sequence fits is not its business.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

from engine.sequence import Sequence

_Entry = tuple[bytes, int, Sequence]


class PrefixFirst:
    """Waiting sequences sorted by their prompt's token ids: depth-first order of the prefix tree they would form.

    The queue is swept like a lift: the next candidate is the first one behind the last that was taken, and the sweep
    starts over at the end. So neighbours share their prefix while it is hot, and nobody waits for ever however many
    new requests sort in front. Preempted sequences go first, the oldest of them in front.
    """

    def __init__(self) -> None:
        self._resumed: deque[Sequence] = deque()
        self._sorted: list[_Entry] = []
        self._arrivals = 0
        self._cursor: tuple[bytes, int] = (b"", 0)

    def __len__(self) -> int:
        return len(self._resumed) + len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resumed
        yield from (seq for _, _, seq in self._sorted)

    def add(self, seq: Sequence) -> None:
        self._arrivals += 1
        insort(self._sorted, (seq.tokens.tobytes(), self._arrivals, seq), key=_order)

    def resume(self, seq: Sequence) -> None:
        """Put back a sequence that ran before. The youngest is preempted first, so the oldest ends up in front."""
        self._resumed.appendleft(seq)

    def candidates(self, *, limit: int) -> list[Sequence]:
        """The first ``limit`` waiting sequences in the order to try them."""
        start = bisect_left(self._sorted, self._cursor, key=_order)
        swept = chain(islice(self._sorted, start, None), islice(self._sorted, start))
        return list(islice(chain(self._resumed, (seq for _, _, seq in swept)), limit))

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out, admitted or aborted."""
        if seq in self._resumed:
            self._resumed.remove(seq)
            return
        key = seq.tokens.tobytes()
        index = bisect_left(self._sorted, (key, 0), key=_order)
        while self._sorted[index][2] is not seq:
            index += 1
        self._cursor = _order(self._sorted.pop(index))


def _order(entry: _Entry) -> tuple[bytes, int]:
    return entry[:2]

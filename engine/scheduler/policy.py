"""The order in which waiting sequences are tried: resumed ones first, then prefix by prefix, the longest of each first.

Owns the waiting queue and nothing else; whether a sequence fits is not its business.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from typing import NamedTuple

from engine.sequence import Sequence


class _Entry(NamedTuple):
    """Entries sort by token ids as int32 bytes, so those that begin alike are neighbours; of equal ones the older first."""

    tokens: bytes
    arrival: int
    seq: Sequence

    @property
    def size(self) -> tuple[int, int, int]:
        """The larger one starts first: more tokens to draw, else a longer prompt, else the older."""
        num_tokens = len(self.seq.tokens)
        return self.seq.max_len - num_tokens, num_tokens, -self.arrival


class PrefixFirst:
    """Waiting sequences in the depth-first order of the tree that their whole blocks form.

    Neighbours share their prefix while it is hot. Among the branches of one node the one with the longest sequence goes
    first, so that what is started last is short and the last steps are not for one long answer alone.

    The queue is taken in sweeps: what comes in meanwhile is put in order behind a sweep that is nearly used up, so nobody
    waits for ever however many larger ones arrive. Preempted sequences go before, the oldest of them in front.
    """

    def __init__(self, *, block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._sorted: list[_Entry] = []
        self._entries: dict[Sequence, _Entry] = {}  # the same, each found by its sequence
        self._resumed: deque[Sequence] = deque()
        self._sweep: dict[Sequence, None] = {}
        self._arrived: dict[Sequence, None] = {}  # in no sweep yet
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._resumed, self._sweep, self._arrived)

    def add(self, seq: Sequence) -> None:
        self._enter(seq)
        self._arrived[seq] = None

    def resume(self, seq: Sequence) -> None:
        """Put back a sequence that ran before. The youngest is preempted first, so the oldest ends up in front."""
        self._enter(seq)
        self._resumed.appendleft(seq)

    def candidates(self, *, limit: int) -> list[Sequence]:
        """The first ``limit`` waiting sequences in the order to try them."""
        if self._arrived and len(self._sweep) < limit:
            entries = sorted(self._entries[seq] for seq in self._arrived)
            self._sweep.update(dict.fromkeys(entry.seq for entry in _depth_first(entries, self._block_bytes)))
            self._arrived.clear()
        return list(islice(chain(self._resumed, self._sweep), limit))

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out, admitted or aborted."""
        entry = self._entries.pop(seq)
        del self._sorted[bisect_left(self._sorted, entry)]
        if seq in self._sweep:
            del self._sweep[seq]
        elif seq in self._arrived:
            del self._arrived[seq]
        else:
            self._resumed.remove(seq)

    def begins_with(self, prefix: bytes) -> bool:
        """Whether a waiting sequence's tokens, as int32 bytes, begin with ``prefix``."""
        place = bisect_left(self._sorted, (prefix,))
        return place < len(self._sorted) and self._sorted[place].tokens.startswith(prefix)

    def _enter(self, seq: Sequence) -> None:
        self._num_arrivals += 1
        entry = self._entries[seq] = _Entry(seq.tokens.tobytes(), self._num_arrivals, seq)
        insort(self._sorted, entry)  # arrivals differ, so sequences are never compared


def _depth_first(entries: list[_Entry], width: int) -> Iterable[_Entry]:
    """Sorted ``entries`` in depth-first order of their tree, a node every ``width`` bytes, larger branches first."""
    open_branches = [entries]
    while open_branches:
        branch = open_branches.pop()
        first, last = branch[0].tokens, branch[-1].tokens
        if len(branch) == 1 or first == last:
            yield from sorted(branch, key=lambda entry: entry.size, reverse=True)
            continue
        fork = _num_shared(first, last, width)  # what the first and the last of a sorted list share, all share
        branches = [list(run) for _, run in groupby(branch, key=lambda entry: entry.tokens[fork : fork + width])]
        open_branches += sorted(branches, key=lambda run: max(entry.size for entry in run))


def _num_shared(first: bytes, last: bytes, width: int) -> int:
    """Leading bytes that two token strings share, in steps of ``width``."""
    start = 0
    while first[start : start + width] == last[start : start + width]:
        start += width
    return start

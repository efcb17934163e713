"""The order in which waiting sequences are tried: resumed ones first, then prefix by prefix, the longest of each first.

Owns the waiting queue and nothing else; whether a sequence fits is not its business.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import NamedTuple

from engine.sequence import Sequence

_PREFILL_TOKENS_PER_STEP = 128
# So many sequences must come after another to be put before it for one step more. It is what keeps short answers from
# waiting for ever, and in the window of 8,192 that the loop allows it lets the files of old rows be finished.
_ARRIVALS_PER_STEP = 32


_weight = attrgetter("weight")


class _Entry(NamedTuple):
    """Entries sort by token ids as int32 bytes, so those that begin alike are neighbours; of equal ones the older first.

    ``weight`` is about the steps that the sequence will take, and more the older it is; the heavier one starts first.
    """

    tokens: bytes
    arrival: int
    weight: float
    seq: Sequence

    @classmethod
    def of(cls, seq: Sequence, *, arrival: int) -> _Entry:
        return cls(seq.tokens.tobytes(), arrival, _num_steps(seq) - arrival / _ARRIVALS_PER_STEP, seq)


class PrefixFirst:
    """Waiting sequences in the depth-first order of the tree that their whole blocks form.

    Neighbours share their prefix while it is hot. Among the branches of one node the one with the longest answer goes
    first, so that what is started last is short and the last steps are not for one long answer alone. Sequences that ran
    before go before all others, who came back last in front.

    The very first to start is the one with the least to do, whatever its prefix: an answer that is there within seconds
    shows that a long job works, and costs it nothing.

    The order is made anew when those that came since are half as many as those that are left in it.
    """

    def __init__(self, *, block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._sorted: list[_Entry] = []
        self._entries: dict[Sequence, _Entry] = {}  # the same, each found by its sequence
        self._resumed: deque[Sequence] = deque()
        self._ordered: dict[Sequence, None] = {}
        self._arrived: dict[Sequence, None] = {}  # not in order yet
        self._num_arrivals = 0
        self._has_begun = False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._resumed, self._ordered, self._arrived)

    def add(self, seq: Sequence) -> None:
        self._enter(seq)
        self._arrived[seq] = None

    def resume(self, seq: Sequence) -> None:
        """Put back a sequence that ran before. Who loses least is preempted first, so who lost most ends up in front."""
        self._enter(seq)
        self._resumed.appendleft(seq)

    def candidates(self, *, limit: int) -> list[Sequence]:
        """The first ``limit`` waiting sequences in the order to try them."""
        if self._arrived and 2 * len(self._arrived) >= len(self._ordered):
            resumed = set(self._resumed)
            entries = [entry for entry in self._sorted if entry.seq not in resumed]
            first = [] if self._has_begun else [min(entries, key=lambda entry: (_num_steps(entry.seq), entry.arrival)).seq]
            self._ordered = dict.fromkeys([*first, *(entry.seq for entry in _depth_first(entries, self._block_bytes))])
            self._has_begun = True
            self._arrived.clear()
        return list(islice(chain(self._resumed, self._ordered), limit))

    def remove(self, seq: Sequence) -> None:
        """Take ``seq`` out, admitted or aborted."""
        entry = self._entries.pop(seq)
        del self._sorted[bisect_left(self._sorted, entry)]
        if seq in self._ordered:
            del self._ordered[seq]
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
        entry = self._entries[seq] = _Entry.of(seq, arrival=self._num_arrivals)
        insort(self._sorted, entry)  # arrivals differ, so sequences are never compared


def _num_steps(seq: Sequence) -> float:
    """About the steps that ``seq`` will take."""
    num_tokens = len(seq.tokens)
    return seq.max_len - num_tokens + num_tokens / _PREFILL_TOKENS_PER_STEP


def _depth_first(entries: list[_Entry], width: int) -> Iterable[_Entry]:
    """Sorted ``entries`` in depth-first order of their tree, a node every ``width`` bytes, heavier branches first."""
    open_branches = [entries]
    while open_branches:
        branch = open_branches.pop()
        if len(branch) == 1:
            yield branch[0]
        elif branch[0].tokens == branch[-1].tokens:
            yield from sorted(branch, key=_weight, reverse=True)
        else:
            start = _num_shared(branch[0].tokens, branch[-1].tokens, width)  # what the ends of a sorted list share, all share
            end = start + width
            branches = [list(run) for _, run in groupby(branch, key=lambda entry: entry.tokens[start:end])]
            open_branches += sorted(branches, key=lambda run: max(map(_weight, run)), reverse=True)[::-1]


def _num_shared(first: bytes, last: bytes, width: int) -> int:
    """Leading bytes that two token strings share, in steps of ``width``."""
    start = 0
    while first[start : start + width] == last[start : start + width]:
        start += width
    return start

"""Counts which full blocks of many prompts are equal, prefix and all, in a bounded amount of memory.

Knows token bytes only; what the counts mean for a pool or a run is told elsewhere.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Iterable
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

_PARTITION_BITS = 6


class _Counts(NamedTuple):
    num_distinct: int
    num_first: int  # distinct blocks that the first prompt to match them has to compute


class BlockCensus:
    """A count of chains of blocks, as the radix tree would hold them.

    A block is known by a 63-bit hash chained over all blocks before it (of 10^8 blocks two are taken for one with a
    chance of 0.05 %). At most ``max_in_memory`` distinct ones are held; more go to temporary files.
    """

    def __init__(self, *, max_in_memory: int = 2**22) -> None:
        self._max_in_memory = max_in_memory
        self._num_matchable = 0
        self._new = array("Q")
        self._known: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._spilled: list[IO[bytes]] = []

    def add(self, keys: Iterable[bytes], *, num_matchable: int) -> None:
        """Count a prompt whose full blocks are ``keys``. It can take the first ``num_matchable`` from the cache; the others it
        computes and publishes whatever is there already."""
        chain = b""
        for index, key in enumerate(keys):
            chain = hashlib.blake2b(chain + key, digest_size=8).digest()
            self._new.append(int.from_bytes(chain, "little") & ~1 | (index >= num_matchable))  # the lowest bit: computed in any case
            self._num_matchable += index < num_matchable
        if len(self._new) >= max(1, self._max_in_memory // 4):
            self._fold()

    def num_matched(self) -> int:
        """Blocks that come out of the cache: all that prompts can match but for the first of each kind.

        Where one prompt computes a block in any case, no other has to.
        """
        return self._num_matchable - sum(counts.num_first for counts in self._counts())

    def num_distinct(self) -> int:
        return sum(counts.num_distinct for counts in self._counts())

    def _fold(self) -> None:
        self._known = np.union1d(self._known, np.frombuffer(self._new, np.uint64))
        self._new = array("Q")
        if len(self._known) > self._max_in_memory:
            self._spill()

    def _spill(self) -> None:
        if not self._spilled:
            # They live as long as this object, and have no name that could outlive it.
            self._spilled = [tempfile.TemporaryFile() for _ in range(2**_PARTITION_BITS)]  # noqa: SIM115
        for file, values in zip(self._spilled, self._partitions(), strict=True):
            file.seek(0, 2)
            file.write(values.tobytes())
        self._known = np.empty(0, np.uint64)

    def _partitions(self) -> list[NDArray[np.uint64]]:
        """What is in memory by its highest bits; it is sorted, so each partition is one piece."""
        borders = [index << (64 - _PARTITION_BITS) for index in range(1, 2**_PARTITION_BITS)]
        return np.split(self._known, np.searchsorted(self._known, np.array(borders, np.uint64)))

    def _counts(self) -> list[_Counts]:
        self._fold()
        if not self._spilled:
            return [_count(self._known)]
        counts = []
        for file, values in zip(self._spilled, self._partitions(), strict=True):
            file.seek(0)
            counts.append(_count(np.union1d(np.frombuffer(file.read(), np.uint64), values)))
        return counts


def _count(values: NDArray[np.uint64]) -> _Counts:
    """``values`` are sorted and distinct: a block's two kinds, if both are there, are neighbours."""
    num_both = int(np.count_nonzero(np.diff(values >> np.uint64(1)) == 0))
    num_matchable = int(np.count_nonzero(values & np.uint64(1) == 0))
    return _Counts(num_distinct=len(values) - num_both, num_first=num_matchable - num_both)

"""Where a step's keys and values are written and read: which block, or which plain place while a block is not full.

Works on ints alone; how numbers are quantised is a format's business, which blocks a sequence holds the block manager's.

A format that quantises does so when a block is full: until then its numbers lie as they came in a *place* beside the pool.
A query reads its own block from that place and every earlier block from the pool, so a chunk is taken apart at block
borders: what a token sees is the same however its prompt was cut, and whoever computed the blocks before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.sequence import Sequence
from engine.types import Chunk, StepPlan

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Places:
    """How many plain blocks lie beside a quantised pool.

    Attributes:
        num_open: blocks that are not full when a step ends; each layer has so many.
        num_filling: blocks that get full in a step. A layer is done with them before the next one begins, so all share them.
    """

    num_open: int
    num_filling: int

    @classmethod
    def for_steps(cls, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> Places:
        """Enough for any plan: a sequence has one open block, and fills it with a token or a new one with ``block_size``."""
        num_filling = min(max_num_batched_tokens, max_num_seqs + max_num_batched_tokens // block_size, num_blocks)
        return cls(min(max_num_seqs, num_blocks), num_filling)


class Piece(NamedTuple):
    """Tokens of one sequence that read through the same blocks; ``place``, where there is one, stands for the last of these."""

    seq: Sequence
    start: int
    num_tokens: int
    place: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One step's way into the pool. Places are numbered as blocks are, from the pool's end on.

    Attributes:
        pieces: the plan's tokens, in its order.
        copies: whole blocks or places (from, to) to copy before anything is written.
        moves: the places (from, to) of blocks that get full in this step, copied in each layer before it is written to.
        full: (place, block) to quantise in each layer once the step's keys and values are written.
    """

    pieces: tuple[Piece, ...]
    copies: Pairs = ()
    moves: Pairs = ()
    full: Pairs = ()

    @classmethod
    def plain(cls, plan: StepPlan) -> Placement:
        """For a format whose blocks are written and read token by token: every chunk is one piece."""
        return cls(pieces=tuple(Piece(chunk.seq, chunk.start, chunk.num_tokens) for chunk in plan.chunks), copies=plan.copies)


class OpenBlocks:
    """Knows in which place each open block lies, from one step to the next.

    A block that is open when a step ends belongs to a sequence that runs, and every sequence that runs is in the next
    plan: a place that the plan does not begin in, or copy from, holds nothing any more.
    """

    def __init__(self, places: Places, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        first_open = num_blocks + places.num_filling
        self._filling = range(num_blocks, first_open)
        self._free = list(range(first_open, first_open + places.num_open))
        self._place_of: dict[int, int] = {}

    def place(self, plan: StepPlan) -> Placement:
        self._keep({source for source, _ in plan.copies} | set(self._begun(plan.chunks)))
        copies = tuple((self._place_of[source], self._open(target)) for source, target in plan.copies)
        filling = iter(self._filling)
        pieces: list[Piece] = []
        moves: list[tuple[int, int]] = []
        full: list[tuple[int, int]] = []
        for chunk in plan.chunks:
            for index, start, end in self._cut(chunk):
                block = chunk.seq.blocks[index]
                if end == (index + 1) * self._block_size:
                    place = next(filling)
                    full.append((place, block))
                    if start > index * self._block_size:
                        moves.append((self._place_of[block], place))
                    self._close(block)
                else:
                    place = self._open(block)
                pieces.append(Piece(chunk.seq, start, end - start, place))
        return Placement(pieces=tuple(pieces), copies=copies, moves=tuple(moves), full=tuple(full))

    def _begun(self, chunks: Iterable[Chunk]) -> Iterable[int]:
        """The blocks that chunks go on to fill."""
        return (chunk.seq.blocks[chunk.start // self._block_size] for chunk in chunks if chunk.start % self._block_size)

    def _cut(self, chunk: Chunk) -> Iterable[tuple[int, int, int]]:
        """The chunk's blocks: (index, first position, end)."""
        start, stop = chunk.start, chunk.start + chunk.num_tokens
        while start < stop:
            index = start // self._block_size
            end = min(stop, (index + 1) * self._block_size)
            yield index, start, end
            start = end

    def _open(self, block: int) -> int:
        if block not in self._place_of:
            self._place_of[block] = self._free.pop()
        return self._place_of[block]

    def _close(self, block: int) -> None:
        if block in self._place_of:
            self._free.append(self._place_of.pop(block))

    def _keep(self, blocks: set[int]) -> None:
        for block in self._place_of.keys() - blocks:
            self._close(block)

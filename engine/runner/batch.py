"""Turns a step's plan into the tensors that the model and the attention read.

Knows sequences and their blocks; decides nothing and computes nothing of the model.
Shape suffixes: T tokens of the step, N rows that score, W rows that score or sample, P pieces.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import AttentionInputs
from engine.kv.format import Filling
from engine.kv.placement import Piece, Placement
from engine.sequence import Sequence
from engine.transfer import Packed
from engine.types import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step's tokens, flat in plan order; all tensors int64. All that a device must know of a step.

    Attributes:
        copies: whole blocks or places (from, to) to copy before anything is written.
        token_ids_T: the tokens to compute.
        positions_T: each token's position in its sequence.
        slots_T: where each token's keys and values go.
        wanted_rows_W: rows of T whose hidden states are wanted: those whose logits give a prompt token's probability, in
            plan order, then those whose logits are drawn from, in plan order.
        scored_ids_N: the prompt tokens whose probability is wanted.
        unknown_2U: rows of T whose token the host does not know yet, and the rows of what the step before drew where it is.
        attention: whose rows are whose, and which blocks each sequence reads. Where the cache's format quantises, a chunk
            is as many sequences as it meets blocks, each of which reads its own block from a place.
        filling: the blocks that get full, where the format quantises.
    """

    copies: tuple[tuple[int, int], ...]
    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    wanted_rows_W: Tensor
    scored_ids_N: Tensor
    unknown_2U: Tensor
    attention: AttentionInputs
    filling: Filling | None = None

    def to(self, device: torch.device) -> Batch:
        """The same with its tensors on ``device``, where the step's numbers go in one transfer."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        numbers = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        packed = Packed([value.shape for value in numbers.values()], dtype=torch.int64, device=device)
        packed.send([value.numpy() for value in numbers.values()])
        moved: dict[str, Any] = dict(zip(numbers, packed.tensors, strict=True))
        return replace(self, **moved, filling=None if self.filling is None else self.filling.to(device))

    def fill_in(self, drawn_M: Tensor) -> None:
        """Write the tokens that the host did not know; ``drawn_M`` is what the step before drew, on the same device."""
        rows_U, sources_U = self.unknown_2U
        self.token_ids_T[rows_U] = drawn_M[sources_U].long()


def build_batch(
    plan: StepPlan, *, block_size: int, placement: Placement | None = None, drawn_rows: Mapping[Sequence, int] | None = None
) -> Batch:
    """The tensors of ``plan``, on the host; every chunk's blocks must be reserved already. ``placement`` is the plan's own,
    by default that of a plain format. ``drawn_rows``: which row of what the step before drew is whose."""
    placement = placement or Placement.plain(plan)
    token_ids = array("i")
    unknown: list[tuple[int, int]] = []
    for chunk in plan.chunks:
        known = chunk.seq.tokens[chunk.start : chunk.start + chunk.num_tokens]
        token_ids.extend(known)
        if len(known) < chunk.num_tokens:
            assert drawn_rows is not None and len(known) == chunk.num_tokens - 1
            unknown.append((len(token_ids), drawn_rows[chunk.seq]))
            token_ids.append(0)

    attention = _attention(placement.pieces, block_size=block_size)
    num_queries = np.diff(attention.query_starts)
    seq_T = np.repeat(np.arange(len(num_queries)), num_queries)
    positions_T = np.arange(len(seq_T)) + np.repeat(attention.kv_lengths - attention.query_starts[1:], num_queries)
    chunk_starts = np.cumsum([0, *(chunk.num_tokens for chunk in plan.chunks)])
    scores = [(chunk, int(first)) for chunk, first in zip(plan.chunks, chunk_starts, strict=False) if chunk.scores]
    scoring_rows = [first + position - 1 - chunk.start for chunk, first in scores for position in chunk.scores]
    scored_ids = [chunk.seq.tokens[position] for chunk, _ in scores for position in chunk.scores]
    samples = np.array([chunk.samples for chunk in plan.chunks], dtype=bool)
    wanted_rows = np.concatenate((np.array(scoring_rows, dtype=np.int64), chunk_starts[1:][samples] - 1))
    return Batch(
        copies=placement.copies,
        token_ids_T=torch.from_numpy(np.array(token_ids, dtype=np.int64)),
        positions_T=torch.from_numpy(positions_T),
        slots_T=torch.from_numpy(attention.slots(seq_T, positions_T)),
        wanted_rows_W=torch.from_numpy(wanted_rows),
        scored_ids_N=torch.tensor(scored_ids, dtype=torch.int64),
        unknown_2U=_pairs(unknown),
        attention=attention,
        filling=_filling(placement),
    )


def _attention(pieces: SequenceOf[Piece], *, block_size: int) -> AttentionInputs:
    starts = np.array([piece.start for piece in pieces], dtype=np.int64)
    counts = np.array([piece.num_tokens for piece in pieces], dtype=np.int64)
    tables_PN = np.zeros((len(pieces), max(len(piece.seq.blocks) for piece in pieces)), dtype=np.int64)
    for row, piece in zip(tables_PN, pieces, strict=True):
        if piece.place is None:
            row[: len(piece.seq.blocks)] = piece.seq.blocks
        else:
            own = piece.start // block_size
            row[:own], row[own] = piece.seq.blocks[:own], piece.place
    query_starts = np.concatenate(([0], np.cumsum(counts)))
    return AttentionInputs(query_starts=query_starts, kv_lengths=starts + counts, block_tables=tables_PN, block_size=block_size)


def _filling(placement: Placement) -> Filling | None:
    if placement.pieces[0].place is None:
        return None
    return Filling(moves_2M=_pairs(placement.moves), full_2F=_pairs(placement.full))


def _pairs(pairs: SequenceOf[tuple[int, int]]) -> Tensor:
    """[2, number of pairs]"""
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous()

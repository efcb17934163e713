"""Turns a step's plan into the tensors that the model and the attention read.

Knows sequences and their blocks; decides nothing and computes nothing of the model.
Shape suffixes: T tokens of the step, N rows that score, W rows that score or sample.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import AttentionInputs
from engine.types import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """One step's tokens, flat in plan order; all tensors int64.

    Attributes:
        token_ids_T: the tokens to compute.
        positions_T: each token's position in its sequence.
        slots_T: where each token's keys and values go.
        wanted_rows_W: rows of T whose hidden states are wanted: those whose logits give a prompt token's probability, in
            plan order, then those whose logits are drawn from, in plan order.
        scored_ids_N: the prompt tokens whose probability is wanted.
        attention: whose rows are whose, and which blocks each sequence reads.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    wanted_rows_W: Tensor
    scored_ids_N: Tensor
    attention: AttentionInputs


def build_batch(plan: StepPlan, *, block_size: int, device: torch.device) -> Batch:
    """The tensors of ``plan`` on ``device``; every chunk's blocks must be reserved already."""
    token_ids = array("i")
    for chunk in plan.chunks:
        token_ids.extend(chunk.seq.tokens[chunk.start : chunk.start + chunk.num_tokens])

    starts = np.array([chunk.start for chunk in plan.chunks], dtype=np.int64)
    counts = np.array([chunk.num_tokens for chunk in plan.chunks], dtype=np.int64)
    query_starts = np.concatenate(([0], np.cumsum(counts)))
    tables = np.zeros((len(plan.chunks), max(len(chunk.seq.blocks) for chunk in plan.chunks)), dtype=np.int64)
    for row, chunk in zip(tables, plan.chunks, strict=True):
        row[: len(chunk.seq.blocks)] = chunk.seq.blocks
    attention = AttentionInputs(query_starts=query_starts, kv_lengths=starts + counts, block_tables=tables, block_size=block_size)

    seq_T = np.repeat(np.arange(len(counts)), counts)
    positions_T = np.arange(len(seq_T)) + np.repeat(starts - query_starts[:-1], counts)
    scores = [(chunk, int(first)) for chunk, first in zip(plan.chunks, query_starts, strict=False) if chunk.scores]
    scoring_rows = [first + position - 1 - chunk.start for chunk, first in scores for position in chunk.scores]
    scored_ids = [chunk.seq.tokens[position] for chunk, _ in scores for position in chunk.scores]
    samples = np.array([chunk.samples for chunk in plan.chunks], dtype=bool)
    wanted_rows = np.concatenate((np.array(scoring_rows, dtype=np.int64), query_starts[1:][samples] - 1))
    return Batch(
        token_ids_T=torch.from_numpy(np.array(token_ids, dtype=np.int64)).to(device),
        positions_T=torch.from_numpy(positions_T).to(device),
        slots_T=torch.from_numpy(attention.slots(seq_T, positions_T)).to(device),
        wanted_rows_W=torch.from_numpy(wanted_rows).to(device),
        scored_ids_N=torch.tensor(scored_ids, dtype=torch.int64, device=device),
        attention=attention,
    )

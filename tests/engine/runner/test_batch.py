"""A plan's tensors against the plan read token by token."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from engine.runner.batch import build_batch
from engine.sequence import Sequence
from engine.types import Chunk, Request, StepPlan


@st.composite
def plans(draw):
    block_size = draw(st.sampled_from([1, 3, 16]))
    free = iter(draw(st.permutations(range(200))))
    chunks = []
    for index in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 30))
        seq = Sequence(
            Request(id=index, prompt_token_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))), max_len=99
        )
        start = draw(st.integers(0, length - 1))
        num_tokens = draw(st.integers(1, length - start))
        seq.blocks = [next(free) for _ in range(-(-(start + num_tokens) // block_size))]
        chunks.append(Chunk(seq, start, num_tokens, draw(st.booleans()) and start + num_tokens == length))
    return StepPlan(tuple(chunks)), block_size


@given(plan_and_size=plans())
def test_every_token_is_where_the_plan_says(plan_and_size):
    plan, block_size = plan_and_size
    batch = build_batch(plan, block_size=block_size, device=torch.device("cpu"))
    rows = [(chunk.seq, position) for chunk in plan.chunks for position in range(chunk.start, chunk.start + chunk.num_tokens)]
    assert batch.token_ids_T.tolist() == [seq.tokens[position] for seq, position in rows]
    assert batch.positions_T.tolist() == [position for _, position in rows]
    assert batch.slots_T.tolist() == [seq.blocks[p // block_size] * block_size + p % block_size for seq, p in rows]
    assert [rows[row] for row in batch.wanted_rows_W.tolist()] == [(chunk.seq, len(chunk.seq.tokens) - 1) for chunk in plan.sampling]

    inputs = batch.attention
    for index, chunk in enumerate(plan.chunks):
        first, end = inputs.query_starts[index : index + 2]
        assert rows[first:end] == [(chunk.seq, position) for position in range(chunk.start, chunk.start + chunk.num_tokens)]
        assert inputs.kv_lengths[index] == chunk.start + chunk.num_tokens
        assert inputs.block_tables[index, : len(chunk.seq.blocks)].tolist() == chunk.seq.blocks

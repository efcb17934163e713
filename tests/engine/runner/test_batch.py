"""A plan's tensors against the plan read token by token."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from engine.kv.placement import OpenBlocks, Places
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
    batch = build_batch(plan, block_size=block_size)
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


@given(plan_and_size=plans())
def test_where_blocks_are_quantised_a_token_is_read_in_its_place(plan_and_size):
    """Each token's own block is a place, those before it are the sequence's; what is in nobody's place is in the pool."""
    plan, block_size = plan_and_size
    places = Places.for_steps(num_blocks=200, block_size=block_size, max_num_seqs=len(plan.chunks), max_num_batched_tokens=plan.num_tokens)
    open_blocks = OpenBlocks(places, num_blocks=200, block_size=block_size)
    begun = [chunk._replace(start=chunk.start - chunk.start % block_size, num_tokens=chunk.start % block_size) for chunk in plan.chunks]
    first = StepPlan(tuple(chunk for chunk in begun if chunk.num_tokens))
    place_of = {(piece.seq, piece.start // block_size): piece.place for piece in open_blocks.place(first).pieces}
    placement = open_blocks.place(plan)
    batch = build_batch(plan, block_size=block_size, placement=placement)
    plain = build_batch(plan, block_size=block_size)
    for name in ("token_ids_T", "positions_T", "wanted_rows_W"):
        assert torch.equal(getattr(batch, name), getattr(plain, name))

    inputs = batch.attention
    slots = iter(batch.slots_T.tolist())
    rows = iter((chunk.seq, position) for chunk in plan.chunks for position in range(chunk.start, chunk.start + chunk.num_tokens))
    moved = dict(placement.moves)
    full = {block: place for place, block in placement.full}
    for piece, length, table in zip(placement.pieces, inputs.kv_lengths, inputs.block_tables, strict=True):
        own = piece.start // block_size
        assert length == piece.start + piece.num_tokens
        assert table[: own + 1].tolist() == [*piece.seq.blocks[:own], piece.place]
        for position in range(piece.start, length):
            assert next(rows) == (piece.seq, position) and position // block_size == own
            assert next(slots) == piece.place * block_size + position % block_size
        assert (length % block_size == 0) == (full.get(piece.seq.blocks[own]) == piece.place)
        if (before := place_of.get((piece.seq, own))) is not None:
            assert piece.place == moved.get(before, before)
    assert next(rows, None) is None
    assert batch.filling.moves_2M.T.tolist() == [list(pair) for pair in placement.moves]
    assert batch.filling.full_2F.T.tolist() == [list(pair) for pair in placement.full]
    assert plain.filling is None

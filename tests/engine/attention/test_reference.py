"""The reference backend's promise: a row's bits depend on its own sequence and position, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

LENGTH = 135


@pytest.fixture(scope="module", params=[(9, 3), (7, 1), (1, 1)], ids=str)
def alone(request, paged_world):
    """A maker of worlds with one same conversation, and its rows computed in one chunk."""
    heads = {"num_heads": request.param[0], "num_kv_heads": request.param[1]}
    first = paged_world(**heads)
    subject = first.conversation(LENGTH)
    return paged_world, heads, subject, first.attend([(subject, 0, LENGTH)])[0]


@st.composite
def crowds(draw):
    """How to compute the conversation: its cuts, the block size, the placement, and who else is in each step."""
    cuts = sorted(draw(st.sets(st.integers(1, LENGTH - 1), max_size=6)))
    return {
        "cuts": [0, *cuts, LENGTH],
        "block_size": draw(st.sampled_from([1, 3, 16, 32, 100])),
        "seed": draw(st.integers(1, 1000)),
        "others": draw(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=8)),
        "place": draw(st.integers(0, 8)),
    }


@given(crowd=crowds())
@settings(max_examples=12, deadline=None)
def test_bits_do_not_depend_on_company_chunks_or_blocks(alone, crowd):
    make_world, heads, subject, expected = alone
    world = make_world(**heads, block_size=crowd["block_size"], seed=crowd["seed"], num_blocks=2000 // crowd["block_size"] + 20)
    moved = world.place(type(subject)(subject.q_PHD, subject.k_PKD, subject.v_PKD))
    others = [(world.conversation(length), max(0, length - num_queries), length) for length, num_queries in crowd["others"]]
    place = min(crowd["place"], len(others))
    for start, end in zip(crowd["cuts"], crowd["cuts"][1:], strict=False):
        result = world.attend([*others[:place], (moved, start, end), *others[place:]])[place]
        assert torch.equal(result, expected[start:end])


def test_bits_are_the_same_token_by_token(alone):
    make_world, heads, subject, expected = alone
    world = make_world(**heads, seed=5)
    moved = world.place(type(subject)(subject.q_PHD, subject.k_PKD, subject.v_PKD))
    mates = [world.conversation(40 + 7 * i) for i in range(10)]
    for position in range(LENGTH):
        num_mates = position % 11
        step = [(mate, len(mate.q_PHD) - 1, len(mate.q_PHD)) for mate in mates[:num_mates]]
        assert torch.equal(world.attend([*step, (moved, position, position + 1)])[-1], expected[position : position + 1])

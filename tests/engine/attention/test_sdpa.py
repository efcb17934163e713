"""How sdpa groups decodes: a prefix that rows share is read once a group, and grouping never changes whose rows are whose."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from engine.attention.backends.sdpa import Backend


def last(conversation):
    return conversation, len(conversation.q_PHD) - 1, len(conversation.q_PHD)


@given(
    trunks=st.lists(
        st.tuples(st.integers(1, 600), st.lists(st.tuples(st.integers(0, 37), st.integers(1, 150)), max_size=8)), min_size=1, max_size=4
    ),
    block_size=st.sampled_from([1, 16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_forests_of_shared_prefixes(paged_world, trunks, block_size, seed):
    """Every trunk has branches that leave it at some block; all of them decode in one step, in any order."""
    world = paged_world(
        backend="sdpa", num_heads=2, num_kv_heads=1, head_dim=8, block_size=block_size, num_blocks=8000 // block_size, seed=seed
    )
    chunks = []
    for length, branches in trunks:
        trunk = world.conversation(length)
        chunks.append(last(trunk))
        for leave_at, own in branches:
            num_shared = min(leave_at * 16, length // block_size * block_size)
            chunks.append(last(world.conversation(num_shared + own, like=trunk, num_shared=num_shared)))
    chunks = [chunks[i] for i in world.random.permutation(len(chunks))]
    for result, chunk in zip(world.attend(chunks), chunks, strict=True):
        torch.testing.assert_close(result.double(), world.expected(*chunk), rtol=0, atol=2e-6)


def test_a_shared_prefix_is_read_once_a_group(paged_world):
    world = paged_world(num_blocks=300)
    trunk = world.conversation(592)
    chunks = [last(world.conversation(592 + 40, like=trunk, num_shared=592)) for _ in range(64)]
    plan = Backend(world.spec).plan(world.inputs(chunks))
    assert sum(group.shared_1L.numel() for group in plan.decodes) == 592
    assert sum(group.own_GL.numel() for group in plan.decodes) == 64 * 40


def test_rows_of_unlike_length_are_not_padded_to_the_longest(paged_world):
    world = paged_world(num_blocks=400)
    lengths = world.random.permutation([20] * 30 + [100] * 30 + [1500])
    plan = Backend(world.spec).plan(world.inputs([last(world.conversation(int(n))) for n in lengths]))
    assert sorted(row for group in plan.decodes for row in group.rows_G.tolist()) == list(range(61))
    assert sum(group.own_GL.numel() for group in plan.decodes) <= 1.2 * np.sum(lengths)

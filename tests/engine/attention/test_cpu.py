"""The native backend's promises, in every tier that this machine runs: bits that depend on the sequence alone, tiles that
are read once for all who share them, and a reason where it cannot serve."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.attention.backends import cpu
from engine.attention.select import select
from engine.kernels.cpu import build
from engine.kernels.cpu.attention import KVLayout, PagedAttention

LENGTH = 150
TILE = 64


@pytest.fixture(scope="module", params=build.TIERS)
def tier(request):
    try:
        build.load(request.param)
    except build.Unavailable as reason:
        pytest.skip(str(reason))
    return request.param


@pytest.fixture(scope="module")
def make_world(paged_world, tier):
    """Makes worlds of this tier, in bfloat16."""
    return lambda **sizes: paged_world(backend=lambda spec: cpu.Backend(spec, tier=tier), dtype=torch.bfloat16, **sizes)


@pytest.fixture(scope="module", params=[(9, 3), (7, 1), (2, 2)], ids=str)
def alone(request, make_world):
    """The heads, one same conversation, and its rows computed in one chunk by one thread."""
    heads = {"num_heads": request.param[0], "num_kv_heads": request.param[1]}
    world = make_world(**heads)
    subject = world.conversation(LENGTH)
    return heads, subject, world.attend([(subject, 0, LENGTH)])[0]


def attend(world, chunks, *, num_threads=1, share_prefixes=True):
    """The step's rows and how many tiles it read."""
    spec, inputs = world.spec, world.inputs(chunks)
    attention = PagedAttention(
        world.backend.library,
        layout=KVLayout(spec.num_kv_heads, spec.head_dim, spec.block_size),
        num_heads=spec.num_heads,
        scale=spec.scale,
        num_threads=num_threads,
        share_prefixes=share_prefixes,
    )
    attention.plan(query_starts=inputs.query_starts, kv_lengths=inputs.kv_lengths, block_tables=inputs.block_tables)
    q_THD = torch.cat([c.q_PHD[start:end] for c, start, end in chunks])
    return attention.attend(q_THD, world.store.layer(0).pointers), attention.num_tiles


def last(conversation):
    return conversation, len(conversation.q_PHD) - 1, len(conversation.q_PHD)


@given(
    cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6),
    block_size=st.sampled_from([16, 32, 48, 128]),
    seed=st.integers(1, 1000),
    others=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=8),
    place=st.integers(0, 8),
    num_threads=st.integers(1, 3),
)
@settings(max_examples=15, deadline=None)
def test_bits_do_not_depend_on_company_chunks_blocks_or_threads(alone, make_world, cuts, block_size, seed, others, place, num_threads):
    heads, subject, expected = alone
    world = make_world(**heads, block_size=block_size, seed=seed, num_blocks=2200 // block_size + 20)
    moved = world.place(type(subject)(subject.q_PHD, subject.k_PKD, subject.v_PKD))
    others = [(world.conversation(length), max(0, length - num_queries), length) for length, num_queries in others]
    place = min(place, len(others))
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), LENGTH], strict=True):
        chunks = [*others[:place], (moved, start, end), *others[place:]]
        rows, _ = attend(world, chunks, num_threads=num_threads)
        assert torch.equal(rows.split([end - start for _, start, end in chunks])[place], expected[start:end])


@given(
    trunks=st.lists(
        st.tuples(st.integers(1, 500), st.lists(st.tuples(st.integers(0, 500), st.integers(1, 150)), max_size=8)), min_size=1, max_size=4
    ),
    block_size=st.sampled_from([16, 48, 128]),
    seed=st.integers(0, 1000),
    num_threads=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_forests_of_shared_prefixes_are_exact(make_world, trunks, block_size, seed, num_threads):
    """Branches leave their trunk, or the branch before them, at some block; all decode or prefill in one step, in any order."""
    world = make_world(num_heads=3, num_kv_heads=1, head_dim=16, block_size=block_size, num_blocks=16000 // block_size, seed=seed)
    chunks = []
    for length, branches in trunks:
        parent = world.conversation(length)
        chunks.append(last(parent))
        for leave_at, own in branches:
            num_shared = min(leave_at, len(parent.q_PHD)) // block_size * block_size
            parent = world.conversation(num_shared + own, like=parent, num_shared=num_shared)
            chunks.append((parent, num_shared + (own - 1) * (own % 2), num_shared + own))
    chunks = [chunks[i] for i in world.random.permutation(len(chunks))]
    rows, _ = attend(world, chunks, num_threads=num_threads)
    apart, num_tiles_apart = attend(world, chunks, share_prefixes=False)
    assert num_tiles_apart == sum(-(-end // TILE) for _, _, end in chunks)
    assert torch.equal(rows, apart)
    for result, chunk in zip(rows.split([end - start for _, start, end in chunks]), chunks, strict=True):
        bound = world.expected(*chunk, of_values=torch.abs) * 2**-7 + 1e-5
        assert ((result.double() - world.expected(*chunk)).abs() <= bound).all()


def test_a_system_prompt_and_documents_under_it_are_read_once(make_world):
    """Two levels: 640 tokens for all, then 320 for each of three documents, then 40 of one's own: 10 + 3 x 5 + 12 tiles."""
    world = make_world(num_blocks=600)
    system = world.conversation(640)
    documents = [world.conversation(960, like=system, num_shared=640) for _ in range(3)]
    chunks = [last(world.conversation(1000, like=document, num_shared=960)) for document in documents for _ in range(4)]
    assert attend(world, chunks)[1] == 10 + 3 * 5 + 12
    assert attend(world, chunks, share_prefixes=False)[1] == 12 * 16


def test_a_chunk_shares_only_what_all_its_queries_see(make_world):
    """Two samples that prefill the same blocks: the tiles from the chunk's first position on are walked apart."""
    world = make_world()
    conversation = world.conversation(300)
    rows, num_tiles = attend(world, [(conversation, 130, 300), last(conversation)])
    assert num_tiles == 2 + 3 + 3
    assert torch.equal(rows[169], rows[170])


def test_unwritten_slots_never_show(make_world):
    """Every length of a sequence in a pool of NaN, read as the last token of a chunk and alone."""
    world = make_world(num_heads=1, head_dim=16, num_blocks=800)
    for length in range(1, 2 * TILE + 2):
        whole = world.conversation(length)
        rows, _ = attend(world, [(whole, 0, length)])
        assert torch.equal(attend(world, [last(whole)])[0], rows[-1:])
        assert rows.isfinite().all()


def test_more_threads_than_work(make_world):
    world = make_world()
    chunk = last(world.conversation(70))
    assert torch.equal(attend(world, [chunk], num_threads=5)[0], attend(world, [chunk])[0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, r"bfloat16 and the model in float32; use model\.dtype=bfloat16"),
        ({"kv_format": "fp32"}, r"kv_cache\.format=bf16"),
        ({"head_dim": 72}, "multiples of 16 up to 256, and this model's is 72"),
        ({"head_dim": 272}, "this model's is 272"),
        ({"block_size": 8}, r"kv_cache\.block_size is 8"),
        ({"device": torch.device("cuda")}, "run on the CPU"),
    ],
)
def test_refuses_with_the_reason(paged_world, change, reason):
    spec = replace(paged_world(dtype=torch.bfloat16).spec, **change)
    with pytest.raises(ValueError, match=rf"engine\.attention: 'cpu' cannot serve this run: .*{reason}"):
        select("cpu", spec=spec)


def test_serves_batch_invariant_runs(paged_world, tier):
    spec = replace(paged_world(dtype=torch.bfloat16).spec, batch_invariant=True)
    assert type(select("auto", spec=spec)) is cpu.Backend


def test_plans_take_their_own_copy(make_world):
    world = make_world()
    chunks = [last(world.conversation(100)), last(world.conversation(30))]
    inputs = world.inputs(chunks)
    plan = world.backend.plan(inputs)
    for array in (inputs.query_starts, inputs.kv_lengths, inputs.block_tables):
        np.copyto(array, 0)
    rows = world.backend.attend(torch.cat([c.q_PHD[-1:] for c, _, _ in chunks]), world.store.layer(0), plan)
    assert torch.equal(rows, torch.cat(world.attend(chunks)))

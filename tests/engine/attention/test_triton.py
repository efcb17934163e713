"""The Triton backend in the interpreter: every way to cut a step gives the same attention, and bits keep to their row."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.attention.backend import AttentionInputs
from engine.attention.backends.triton import Backend, Cut
from engine.attention.select import select
from engine.attention.work import NOBODY, cut

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")


def cutting(**how):
    """A backend for a GPU that wants as many items as can be, each of at least 64 positions, with what else is said."""
    return lambda spec: Backend(spec, cut=Cut(**({"num_items": 1000, "min_segment": 64} | how)))


def one_step(world):
    """Decodes of many lengths, four of them over one prefix, and a chunk."""
    trunk = world.conversation(160)
    shared = 160 // world.spec.block_size * world.spec.block_size
    branches = [world.conversation(160 + n, like=trunk, num_shared=shared) for n in (1, 5, 41)]
    decodes = [trunk, *branches, *(world.conversation(n) for n in (1, 16, 17, 129))]
    return [*((c, len(c.q_PHD) - 1, len(c.q_PHD)) for c in decodes), (world.conversation(90), 30, 77)]


COVERING = [  # each pair of heads, head size, block size, mask, dtype and cut that may matter to one another
    {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "block_size": 16},
    {"num_heads": 7, "num_kv_heads": 1, "head_dim": 96, "block_size": 32, "window": 33},
    {"num_heads": 6, "num_kv_heads": 2, "head_dim": 80, "block_size": 1, "soft_cap": 5.0},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 128, "block_size": 48, "window": 70, "soft_cap": 20.0},
    {"num_heads": 20, "num_kv_heads": 1, "head_dim": 64, "block_size": 256, "window": 1},
    {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256, "block_size": 16, "dtype": torch.bfloat16},
    {"num_heads": 6, "num_kv_heads": 2, "head_dim": 72, "block_size": 16, "dtype": torch.float16, "window": 100},
    {"num_heads": 3, "num_kv_heads": 3, "head_dim": 64, "block_size": 64, "dtype": torch.bfloat16, "soft_cap": 30.0},
]


@pytest.mark.parametrize("how", [{"num_items": 0, "min_saved_tokens": None}, {"min_saved_tokens": 100}], ids=["whole", "cut and shared"])
@pytest.mark.parametrize("sizes", COVERING, ids=str)
def test_equals_attention_by_its_definition(paged_world, device, sizes, how):
    """Float32 to its last bits; else each weight and the result are rounded by at most one unit, and all between is float32."""
    world = paged_world(backend=cutting(**how), num_blocks=4000 // sizes["block_size"], device=device, **sizes)
    unit = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[world.spec.dtype]
    chunks = one_step(world)
    for result, chunk in zip(world.attend(chunks), chunks, strict=True):
        bound = world.expected(*chunk, of_values=torch.abs) * 2 * unit + 1e-5
        assert ((result.double() - world.expected(*chunk)).abs() <= bound).all()


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "window"), [(6, 2, None), (7, 1, 50)])
def test_bits_do_not_depend_on_company_chunks_or_blocks(paged_world, device, num_heads, num_kv_heads, window):
    """With batch_invariant, beside a long row and beside rows with the same beginning."""
    sizes = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "window": window,
        "head_dim": 16,
        "batch_invariant": True,
        "backend": "triton",
        "device": device,
    }
    alone = paged_world(**sizes)
    subject = alone.conversation(130)
    expected = alone.attend([(subject, 0, 130)])[0]
    world = paged_world(**sizes, block_size=32, num_blocks=900, seed=1)
    moved = world.place(type(subject)(subject.q_PHD, subject.k_PKD, subject.v_PKD))
    twins = [world.conversation(129, like=moved, num_shared=128) for _ in range(3)]
    mates = [(c, len(c.q_PHD) - 1, len(c.q_PHD)) for c in (world.conversation(700), *twins)]
    for start, end in [(0, 3), (3, 64), (64, 65), (65, 129), (129, 130)]:
        place = start % 3
        result = world.attend([*mates[:place], (moved, start, end), *mates[place:]])[place]
        assert torch.equal(result, expected[start:end])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nothing_is_cut_or_shared_where_bits_must_not_depend_on_company(paged_world, batch_invariant):
    world = paged_world(backend="triton", batch_invariant=batch_invariant, num_blocks=200)
    trunk = world.conversation(1040)
    rows = [world.conversation(1040, like=trunk, num_shared=1024) for _ in range(16)]
    for chunks in ([(row, 1039, 1040) for row in rows], [(trunk, 1039, 1040), *((row, 1030, 1040) for row in rows[:1])]):
        work = world.backend.plan(world.inputs(chunks)).work
        assert (len(work.merged_N) == 0) == batch_invariant


@st.composite
def steps(draw):
    """Sequences in families of a common trunk, each with a chunk or a decode; and how to cut them."""
    block_size = draw(st.sampled_from([1, 3, 16]))
    tables, lengths, num_queries, next_block = [], [], [], 1
    for trunk, own in draw(
        st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(1, 60), min_size=1, max_size=5)), min_size=1, max_size=4)
    ):
        shared = list(range(next_block, next_block + trunk))
        next_block += trunk
        for length in own:
            num_own = -(-length // block_size)
            tables.append([*shared, *range(next_block, next_block + num_own)])
            next_block += num_own
            lengths.append(trunk * block_size + length)
            num_queries.append(draw(st.sampled_from([1, 1, 1, length])))
    width = max(map(len, tables))
    inputs = AttentionInputs(
        query_starts=np.cumsum([0, *num_queries]),
        kv_lengths=np.array(lengths),
        block_tables=np.array([table + [0] * (width - len(table)) for table in tables]),
        block_size=block_size,
    )
    how = {
        "tile_queries": draw(st.sampled_from([1, 2, 5, 8])),
        "min_saved_tokens": draw(st.sampled_from([None, 1, 40])),
        "num_items": draw(st.sampled_from([0, 3, 100])),
        "min_segment": draw(st.sampled_from([1, 16])),
    }
    return inputs, how


@given(step=steps())
@settings(max_examples=300, deadline=None)
def test_work_covers_each_position_of_each_query_once(step):
    inputs, how = step
    work = cut(inputs, **how)
    num_tokens, num_whole = int(inputs.query_starts[-1]), len(cut(inputs, **how | {"num_items": 0}).seq_I)
    assert len(work.seq_I) <= num_whole + how["num_items"]
    own = cut(inputs, **how | {"min_saved_tokens": None})
    item_N, place_N = np.nonzero(own.tokens_IQ != NOBODY)
    assert np.array_equal(own.positions_IQ[item_N, place_N] % how["tile_queries"], place_N)
    seen = {token: [] for token in range(num_tokens)}
    targets = {token: [] for token in range(num_tokens)}
    seq_T = np.repeat(np.arange(len(inputs.kv_lengths)), np.diff(inputs.query_starts))
    for item in range(len(work.seq_I)):
        assert work.begin_I[item] < work.end_I[item]
        positions = np.arange(work.begin_I[item], work.end_I[item])
        for place in np.flatnonzero(work.tokens_IQ[item] != NOBODY):
            token, position = work.tokens_IQ[item, place], work.positions_IQ[item, place]
            own = inputs.slots(seq_T[token], positions[positions <= position])
            assert np.array_equal(own, inputs.slots(work.seq_I[item], positions[positions <= position]))
            seen[token] += own.tolist()
            targets[token].append(int(work.targets_IQ[item, place]))
    for token, slots in seen.items():
        seq = seq_T[token]
        position = inputs.kv_lengths[seq] - inputs.query_starts[seq + 1] + token
        assert slots == inputs.slots(seq, np.arange(position + 1)).tolist()
        if token in work.merged_N:
            place = int(np.flatnonzero(work.merged_N == token)[0])
            assert [-1 - target for target in targets[token]] == list(range(work.parts_N1[place], work.parts_N1[place + 1]))
        else:
            assert targets[token] == [token]


def test_a_prefix_is_read_once_where_that_saves_enough(paged_world):
    """17 rows over 800 tokens save 12,800 and 15 rows 11,200: the test's limit lies at 12,000."""
    world = paged_world(backend="triton", num_blocks=200)
    trunk = world.conversation(801)
    rows = [world.conversation(801, like=trunk, num_shared=800) for _ in range(17)]
    decodes = [(row, 800, 801) for row in rows]

    def positions_read(chunks):
        work = world.backend.plan(world.inputs(chunks)).work
        return int((work.end_I - work.begin_I).sum())

    assert positions_read(decodes[:15]) == 15 * 801
    assert positions_read(decodes) == -(-17 // 5) * 800 + 17  # 5 queries of 3 heads each fill a tile of 16 rows


def test_long_rows_are_cut_only_where_items_are_few(paged_world):
    world = paged_world(backend=cutting(num_items=8, min_segment=128), num_blocks=1200)
    decodes = [(c, len(c.q_PHD) - 1, len(c.q_PHD)) for c in (world.conversation(1000) for _ in range(16))]
    assert len(world.backend.plan(world.inputs(decodes)).work.seq_I) == 16
    assert len(world.backend.plan(world.inputs(decodes[:1])).work.seq_I) == 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_format": "int8"}, r"fp32, bf16, fp16, not in int8; set kv_cache\.format"),
        ({"head_dim": 320}, "up to 256, and this model's is 320"),
    ],
)
def test_refuses_with_the_reason(paged_world, change, reason):
    with pytest.raises(ValueError, match=rf"engine\.attention: 'triton' cannot serve this run: .*{reason}"):
        select("triton", spec=replace(paged_world().spec, **change))


def test_refuses_a_cpu_without_the_interpreter(paged_world, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="run on an NVIDIA GPU, not on cpu"):
        select("triton", spec=paged_world().spec)


def test_nothing_loads_triton_until_it_is_asked_for():
    code = "import sys, engine, engine.build, jobs.__main__; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

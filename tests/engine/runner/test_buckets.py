"""Decodes in padded sizes through recorded steps, against the same decodes as they are."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.attention.backend import AttentionInputs, AttentionSpec
from engine.attention.backends.triton import Backend, Cut
from engine.kv.format import load_format
from engine.kv.shape import BlockShape
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.layers.spec import DecoderSpec
from engine.runner.buckets import BucketedForward, bucket_sizes
from engine.runner.cudagraph import CudaGraphs, EagerGraphs
from engine.runner.fused import FusedForward
from engine.runner.parallel import Alone
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.stats import Stats
from engine.types import Chunk, Request, StepPlan

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 4, 60, 12


@pytest.mark.parametrize("max_num_seqs", range(1, 70))
def test_sizes_hold_any_number_of_rows_and_at_most_as_many_empty_ones(max_num_seqs):
    sizes = bucket_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs and list(sizes) == sorted(set(sizes))
    for num_rows in range(1, max_num_seqs + 1):
        assert min(size for size in sizes if size >= num_rows) < 2 * num_rows


def test_a_recorded_computation_reads_its_inputs_anew_and_writes_one_tensor(device):
    graphs = CudaGraphs() if device == "cuda" else EagerGraphs()
    source = torch.arange(4.0, device=device)
    replay = graphs.record(lambda: source * 2 + 1)
    first = replay()
    assert first.tolist() == [1, 3, 5, 7]
    source.fill_(5.0)
    second = replay()
    assert second.tolist() == [11] * 4
    assert first.data_ptr() == second.data_ptr(), "a result lasts until the next call"


@st.composite
def steps(draw):
    """Block tables and lengths of decodes, some over common blocks, and how finely they may be cut."""
    block_size = draw(st.integers(1, 5))
    trunks = [draw(st.lists(st.integers(0, 500), min_size=1, max_size=9)) for _ in range(2)]
    seqs = []
    for _ in range(draw(st.integers(1, 9))):
        trunk = draw(st.sampled_from(trunks))
        blocks = [*trunk[: draw(st.integers(0, len(trunk)))], *draw(st.lists(st.integers(0, 500), min_size=1, max_size=6))]
        seqs.append((blocks, draw(st.integers((len(blocks) - 1) * block_size + 1, len(blocks) * block_size))))
    how = Cut(
        num_items=draw(st.integers(0, 40)), min_segment=draw(st.integers(1, 8)), min_saved_tokens=draw(st.sampled_from([None, 1, 20]))
    )
    return seqs, block_size, how


def inputs_of(seqs, block_size) -> AttentionInputs:
    tables = np.zeros((len(seqs), max(len(blocks) for blocks, _ in seqs)), dtype=np.int64)
    for row, (blocks, _) in zip(tables, seqs, strict=True):
        row[: len(blocks)] = blocks
    lengths = np.array([length for _, length in seqs])
    return AttentionInputs(query_starts=np.arange(len(seqs) + 1), kv_lengths=lengths, block_tables=tables, block_size=block_size)


def backend(spec: DecoderSpec, how: Cut, *, block_size: int, device="cpu") -> Backend:
    attention = AttentionSpec(
        device=torch.device(device),
        dtype=torch.float32,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.attention_scale,
        block_size=block_size,
        kv_format="fp32",
        batch_invariant=False,
    )
    return Backend(attention, cut=how)


@settings(max_examples=300, deadline=None)
@given(step=steps(), more=st.integers(0, 7))
def test_a_fixed_plan_has_room_for_any_step(spec, step, more):
    """What a step has is in its place, and what is left is nobody's."""
    seqs, block_size, how = step
    served = backend(spec, how, block_size=block_size)
    inputs = inputs_of(seqs, block_size).padded(len(seqs) + more, block=501)
    exact = served.plan(inputs).work
    fixed = served.fixed_plan(num_seqs=len(seqs) + more, num_blocks=20)
    served.refill(fixed, inputs)
    for name in ("tokens_IQ", "positions_IQ", "targets_IQ", "seq_I", "begin_I", "end_I", "merged_N", "parts_N1"):
        wanted, found = getattr(exact, name), getattr(fixed.work, name)
        assert torch.equal(found[: len(wanted)], wanted)
        assert (found[len(wanted) :] == -1).all()
        assert found.data_ptr() % 16 == 0 or not found.numel(), "one compilation serves all steps"
    assert torch.equal(fixed.work.tables_SN[:, : inputs.block_tables.shape[1]], exact.tables_SN)


class Bench:
    """A decoder over a pool of NaN, plainly or in recorded steps, and sequences whose tokens come from a seed."""

    def __init__(self, model: Decoder, how: Cut, *, device: str, max_num_seqs: int | None) -> None:
        spec = model.spec
        store = KVStore(
            load_format("fp32"),
            shape=BlockShape(block_size=BLOCK_SIZE, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim),
            num_layers=spec.num_layers,
            num_blocks=NUM_BLOCKS + 1,
            device=torch.device(device),
        )
        self.pools = [pool for layer in range(spec.num_layers) for pool in store.layer(layer).pools]
        for pool in self.pools:
            pool.fill_(torch.nan)
        forward = FusedForward(model, store=store, backend=backend(spec, how, block_size=BLOCK_SIZE, device=device))
        if max_num_seqs is not None:
            forward = BucketedForward(
                forward,
                sizes=bucket_sizes(max_num_seqs),
                spare_block=NUM_BLOCKS,
                max_blocks=MAX_BLOCKS,
                graphs=CudaGraphs() if device == "cuda" else EagerGraphs(),
            )
        self.forward = forward
        sampler = Sampler(num_valid_tokens=spec.vocab_size, seed=0)
        self.runner = ModelRunner(forward, store=store, sampler=sampler, stats=Stats(), device=torch.device(device), team=Alone())

    def answers(self, num_steps: list[int]) -> list[tuple[list[int], list[float]]]:
        """Prompts at once, then steps of decodes alone; sequence i takes part in the first ``num_steps[i]`` of them."""
        free = iter(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist())
        trunk = [next(free) for _ in range(2)]
        seqs = []
        for index in range(len(num_steps)):
            prompt = [*range(8), *((index * 7 + j) % 53 for j in range(1 + index % 3))]
            params = SamplingParams(temperature=0.0 if index % 2 else 0.9, max_tokens=50)
            seq = Sequence(Request(id=index, prompt_token_ids=prompt, sampling=params), max_len=60)
            seq.blocks = [*trunk, next(free), next(free), next(free)]
            seqs.append(seq)
        first, *others = (Chunk(seq, 0 if seq is seqs[0] else 8, len(seq.tokens) - (0 if seq is seqs[0] else 8), True) for seq in seqs)
        self._step([first])
        if others:
            self._step(others)
        for step in range(max(num_steps)):
            self._step([Chunk(seq, len(seq.tokens) - 1, 1, True) for seq, last in zip(seqs, num_steps, strict=True) if step < last])
        return [(seq.tokens.tolist(), seq.logprobs) for seq in seqs]

    def _step(self, chunks) -> None:
        for chunk, draw in zip(chunks, self.runner.run(StepPlan(tuple(chunks))), strict=True):
            chunk.seq.append(draw)


@pytest.fixture
def make_bench(make_decoder, device):
    """Builds a Bench, as many as a test needs, all over the same weights."""
    return partial(Bench, make_decoder(device=device), device=device)


HOW = {"whole": Cut(num_items=0, min_saved_tokens=None), "cut and shared": Cut(num_items=20, min_segment=4, min_saved_tokens=1)}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize(("num_steps", "max_num_seqs"), [([9, 5, 5, 3, 2], 5), ([6, 4, 1], 8), ([4], 1)])
def test_tokens_are_those_of_steps_as_they_are(make_bench, how, num_steps, max_num_seqs):
    expected = make_bench(how, max_num_seqs=None).answers(num_steps)
    bench = make_bench(how, max_num_seqs=max_num_seqs)
    found = bench.answers(num_steps)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, wanted) in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(wanted, abs=1e-5)
    used = {
        min(size for size in bucket_sizes(max_num_seqs) if size >= sum(step < last for last in num_steps)) for step in range(max(num_steps))
    }
    assert used <= set(bench.forward._buckets), "decodes were recorded in the size that holds them"


def test_empty_rows_write_to_the_spare_block_alone(make_bench):
    """Three decodes in a step of eight rows leave every block that is not theirs as it was."""
    bench = make_bench(HOW["whole"], max_num_seqs=8)
    bench.answers([1, 1, 1])
    written = [(~pool.isnan()).flatten(1).any(1) for pool in bench.pools]
    for blocks in written:
        assert bool(blocks[NUM_BLOCKS]), "the spare one"
        assert int(blocks.sum()) == 1 + 2 + 3, "the two of the common prompt, and the third of each"
    others = make_bench(HOW["whole"], max_num_seqs=None)
    others.answers([1, 1, 1])
    for pool, plain in zip(bench.pools, others.pools, strict=True):
        torch.testing.assert_close(pool[:NUM_BLOCKS], plain[:NUM_BLOCKS], equal_nan=True, atol=1e-5, rtol=1e-5)

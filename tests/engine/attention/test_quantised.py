"""Every backend over every format that quantises: a query sees its own block plain, and each earlier block as it is stored.

Held against attention in float64, straight from that definition, however prompts are cut into steps.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine import plugins
from engine.attention.backend import AttentionSpec
from engine.kv.format import load_format
from engine.kv.placement import Places
from engine.kv.shape import BlockShape
from engine.kv.store import KVStore
from engine.runner.batch import build_batch
from engine.sequence import Sequence
from engine.types import Chunk, Request, StepPlan

NAMES = ("int8", "fp8", "fp4")
BACKENDS = plugins.names("engine.attention.backends")
MAX_SEQS, BUDGET, NUM_BLOCKS = 8, 200, 120


def backends(name: str, spec: AttentionSpec):
    """The backend, or a skip with its reason."""
    module = plugins.load("engine.attention.backends", name, key="engine.attention")
    if (reason := module.refuse(spec)) is not None:
        pytest.skip(reason)
    return module.Backend(spec)


class World:
    """Sequences of random queries, keys and values that are computed step by step."""

    def __init__(
        self, name: str, kv_format: str, *, block_size: int = 16, dtype=torch.float32, head_dim: int = 64, num_heads: int = 6
    ) -> None:
        self.spec = AttentionSpec(
            device=torch.device("cpu"),
            dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=2,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            block_size=block_size,
            kv_format=kv_format,
            batch_invariant=False,
        )
        self.backend = backends(name, self.spec)
        num_blocks = NUM_BLOCKS * 16 // block_size
        shape = BlockShape(block_size=block_size, num_kv_heads=2, head_dim=head_dim)
        places = Places.for_steps(num_blocks=num_blocks, block_size=block_size, max_num_seqs=MAX_SEQS, max_num_batched_tokens=BUDGET)
        sizes = {"shape": shape, "num_layers": 1, "num_blocks": num_blocks, "device": self.spec.device, "places": places}
        self.store = KVStore(self.backend.kv_format, dtype=dtype, **sizes)
        self.roundtrip = KVStore(load_format(kv_format), dtype=torch.float32, **sizes)
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self.numbers: dict[Sequence, tuple[torch.Tensor, ...]] = {}

    def sequence(self, length: int, *, seed: int, like: Sequence | None = None, num_shared: int = 0) -> Sequence:
        generator = torch.Generator().manual_seed(seed)
        seq = Sequence(Request(id=seed, prompt_token_ids=[1] * length), max_len=length + 1)
        heads = (self.spec.num_heads, self.spec.num_kv_heads, self.spec.num_kv_heads)
        self.numbers[seq] = _, k, v = tuple(
            torch.randn(length, n, self.spec.head_dim, generator=generator).to(self.spec.dtype) for n in heads
        )
        if like is not None:
            seq.blocks = like.blocks[: num_shared // self.spec.block_size]
            k[:num_shared], v[:num_shared] = (part[:num_shared] for part in self.numbers[like][1:])
        while len(seq.blocks) * self.spec.block_size < length:
            seq.blocks.append(self.free.pop())
        return seq

    def step(self, *chunks: tuple[Sequence, int, int]) -> list[torch.Tensor]:
        plan = StepPlan(tuple(Chunk(seq, start, end - start, samples=False) for seq, start, end in chunks))
        batch = build_batch(plan, block_size=self.spec.block_size, placement=self.store.place(plan))
        q, k, v = (torch.cat([self.numbers[seq][part][start:end] for seq, start, end in chunks]) for part in range(3))
        self.store.write(0, k, v, batch.slots_T, batch.filling)
        result = self.backend.attend(q, self.store.layer(0), self.backend.plan(batch.attention))
        return list(result.split([end - start for _, start, end in chunks]))

    def stored(self, seq: Sequence) -> list[torch.Tensor]:
        """Keys and values of the sequence's full blocks as the format keeps them, float32 [P, K, D]."""
        _, k, v = (part.float() for part in self.numbers[seq])
        num_full = len(k) // self.spec.block_size
        codecs = (load_format(self.spec.kv_format).keys, load_format(self.spec.kv_format).values)
        found = []
        for codec, x in zip(codecs, (k, v), strict=True):
            x_NKBD = x[: num_full * self.spec.block_size].unflatten(0, (num_full, -1)).transpose(1, 2)
            rows = tuple(part.expand(-1, -1, self.spec.block_size, -1).flatten(0, 2) for part in codec.encode(x_NKBD))
            found.append(codec.decode(rows).view(x_NKBD.shape).transpose(1, 2).flatten(0, 1))
        return found

    def expected(self, seq: Sequence, *, of_values=torch.Tensor.double) -> torch.Tensor:
        """All rows of the sequence, float64 [P, H, D]."""
        q, k, v = (part.double() for part in self.numbers[seq])
        full_k, full_v = (part.double() for part in self.stored(seq))
        rows = []
        for position in range(len(q)):
            own = position // self.spec.block_size * self.spec.block_size
            keys, values = (
                torch.cat((full[:own], plain[own : position + 1])).repeat_interleave(self.spec.queries_per_kv, dim=1)
                for full, plain in ((full_k, k), (full_v, v))
            )
            weights = (torch.einsum("hd,phd->hp", q[position], keys) * self.spec.scale).softmax(-1)
            rows.append(torch.einsum("hp,phd->hd", weights, of_values(values)))
        return torch.stack(rows)

    def computed(self, seq: Sequence, cuts: list[int], others: list[Sequence] = ()) -> torch.Tensor:
        """The sequence's rows, cut into steps in which ``others`` go on token by token."""
        rows = []
        for index, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(self.numbers[seq][0])], strict=True)):
            beside = [(other, index, index + 1) for other in others if index < len(self.numbers[other][0])]
            rows.append(self.step(*beside, (seq, start, end))[len(beside)])
        return torch.cat(rows)


CUTS = [[], [16, 32, 48], [5, 20, 21, 40, 77], list(range(1, 99))]


@pytest.mark.parametrize("cuts", CUTS, ids=["whole", "at borders", "anywhere", "token by token"])
@pytest.mark.parametrize("kv_format", NAMES)
@pytest.mark.parametrize("name", BACKENDS)
def test_own_block_plain_and_earlier_ones_as_stored(name, kv_format, cuts):
    world = World(name, kv_format)
    seq = world.sequence(99, seed=0)
    others = [world.sequence(length, seed=length) for length in (1, 16, 33)]
    torch.testing.assert_close(world.computed(seq, cuts, others).double(), world.expected(seq), atol=5e-6, rtol=0)


@pytest.mark.parametrize("kv_format", NAMES)
@pytest.mark.parametrize("name", BACKENDS)
def test_in_bfloat16(name, kv_format):
    """Weights and results are rounded to 8 bits; what is stored is read as it is."""
    world = World(name, kv_format, dtype=torch.bfloat16)
    seq = world.sequence(150, seed=0)
    found = world.computed(seq, [40, 41, 95])
    assert found.dtype == torch.bfloat16
    bound = world.expected(seq, of_values=torch.abs) * 2**-6 + 2e-3
    assert ((found.double() - world.expected(seq)).abs() <= bound).all()


@pytest.mark.parametrize("kv_format", NAMES)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_prefix_that_another_computed(name, kv_format):
    world = World(name, kv_format)
    first = world.sequence(80, seed=1)
    world.computed(first, [33])
    seconds = [world.sequence(length, seed=length, like=first, num_shared=64) for length in (65, 70, 97)]
    for seq, rows in zip(seconds, world.step(*((seq, 64, len(seq.tokens)) for seq in seconds)), strict=True):
        torch.testing.assert_close(rows.double(), world.expected(seq)[64:], atol=5e-6, rtol=0)


@pytest.mark.parametrize(("name", "dtype"), [("reference", torch.float32), ("cpu", torch.bfloat16)])
@given(cuts=st.sets(st.integers(1, 179), max_size=10), block_size=st.sampled_from([16, 32, 48]), kv_format=st.sampled_from(NAMES))
@settings(max_examples=15, deadline=None)
def test_bits_do_not_depend_on_the_cuts(name, dtype, cuts, block_size, kv_format):
    if name == "cpu" and kv_format == "fp4":
        kv_format = "int8"
    whole, cut = (World(name, kv_format, block_size=block_size, dtype=dtype) for _ in range(2))
    others = [cut.sequence(length, seed=length) for length in (7, 16)]
    expected = whole.computed(whole.sequence(180, seed=3), [])
    assert torch.equal(cut.computed(cut.sequence(180, seed=3), sorted(cuts), others), expected)


@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_the_kernels_bits_are_the_same_token_by_token(kv_format):
    """One row at a time reads the codes where many rows read what was decoded for all of them."""
    whole, cut = (World("cpu", kv_format, dtype=torch.bfloat16) for _ in range(2))
    expected = whole.computed(whole.sequence(200, seed=3), [])
    assert torch.equal(cut.computed(cut.sequence(200, seed=3), list(range(1, 200))), expected)


def test_sdpa_reads_a_chunk_in_pieces_once():
    """99 tokens are seven pieces: six full blocks as they are stored, and each one's own tokens plain."""
    world = World("sdpa", "int8")
    seq, other = world.sequence(99, seed=0), world.sequence(20, seed=1)
    plan = StepPlan((Chunk(other, 0, 20, samples=False), Chunk(seq, 0, 99, samples=False)))
    batch = build_batch(plan, block_size=16, placement=world.store.place(plan))
    assert len(batch.attention.kv_lengths) == 2 + 7
    assert [chunk.slots_1L.numel() for chunk in world.backend.plan(batch.attention).chunks] == [16 + 20, 96 + 99]

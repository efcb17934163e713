"""Whole steps of a small random decoder against a plain forward pass over each sequence by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine import plugins
from engine.attention.backend import AttentionSpec
from engine.attention.select import select
from engine.kv.format import load_format
from engine.kv.shape import BlockShape
from engine.kv.store import KVStore
from engine.layers.decoder import Decoder
from engine.runner.forward import TorchForward
from engine.runner.fused import FusedForward
from engine.runner.parallel import Alone
from engine.runner.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.stats import Stats
from engine.types import Chunk, Request, StepPlan

CPU = torch.device("cpu")
BLOCK_SIZE = 4


class Bench:
    """A runner over a pool of NaN, and sequences that get their blocks by hand."""

    def __init__(self, model: Decoder, name: str, *, batch_invariant: bool = False, num_blocks: int = 200) -> None:
        self.model, spec = model, model.spec
        attention = AttentionSpec(
            device=CPU,
            dtype=torch.float32,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            block_size=BLOCK_SIZE,
            kv_format="fp32",
            batch_invariant=batch_invariant,
        )
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).tolist()
        store = KVStore(
            load_format("fp32"),
            shape=BlockShape(block_size=BLOCK_SIZE, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim),
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            device=CPU,
        )
        for layer in range(spec.num_layers):
            store.layer(layer).keys.fill_(torch.nan)
            store.layer(layer).values.fill_(torch.nan)
        sampler = Sampler(num_valid_tokens=spec.vocab_size, seed=0)
        forward_class = FusedForward if name == "triton" else TorchForward
        forward = forward_class(self.model, store=store, backend=select(name, spec=attention))
        self.runner = ModelRunner(forward, store=store, sampler=sampler, stats=Stats(), device=CPU, team=Alone())

    def sequence(self, tokens: list[int], *, blocks: list[int] | None = None, id: int = 0, **params) -> Sequence:
        seq = Sequence(Request(id=id, prompt_token_ids=tokens, sampling=SamplingParams(**params)), max_len=200)
        seq.blocks = list(blocks or [])
        while len(seq.blocks) * BLOCK_SIZE < len(tokens) + 12:
            seq.blocks.append(self.free.pop())
        return seq

    def prompts(self, num: int) -> list[list[int]]:
        """The first is of 5 tokens, each further one of 6 more."""
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(self.model.spec.vocab_size, (5 + 6 * i,), generator=generator).tolist() for i in range(num)]

    def run(self, *chunks: Chunk, copies=()) -> list:
        return self.runner.run(StepPlan(tuple(chunks), copies))

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities after each token, [T, V], by causal attention over the whole sequence, without a cache."""
        scale = self.model.spec.attention_scale

        def attend(layer, q, k, v):
            heads_first = (part.transpose(0, 1) for part in (q, k, v))
            return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True, scale=scale).transpose(0, 1)

        hidden = self.model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        return self.model.logits(hidden).log_softmax(-1)

    def check(self, draw, tokens: list[int]) -> None:
        logprobs = self.expected(tokens)[-1]
        assert draw.token_id == logprobs.argmax()
        assert draw.logprob == pytest.approx(logprobs.max().item(), abs=2e-5)


# The native kernels compute in bfloat16 only; tests/engine/attention holds them to the bound of its rounding. flash needs a GPU.
@pytest.fixture(params=sorted(set(plugins.names("engine.attention.backends")) - {"cpu", "flash"}))
def bench(request, make_decoder):
    return Bench(make_decoder(), request.param)


def test_chunked_prefill_and_decode_in_mixed_steps(bench):
    seqs = [bench.sequence(tokens, temperature=0) for tokens in bench.prompts(5)]
    computed = dict.fromkeys(seqs, 0)
    for step in range(12):  # each sequence goes its own pace: a step holds decodes, short chunks and long ones
        chunks = []
        for index, seq in enumerate(seqs):
            num_tokens = min(len(seq.tokens) - computed[seq], 1 + (step * 5 + index * 3) % 9)
            chunks.append(Chunk(seq, computed[seq], num_tokens, computed[seq] + num_tokens == len(seq.tokens)))
            computed[seq] += num_tokens
        draws = iter(bench.run(*chunks))
        for chunk in chunks:
            if chunk.samples:
                draw = next(draws)
                bench.check(draw, chunk.seq.tokens.tolist())
                chunk.seq.append(draw)
        assert next(draws, None) is None
    assert min(seq.num_generated for seq in seqs) > 0


def test_shared_blocks_are_read_by_all_and_a_copied_block_goes_its_own_way(bench):
    trunk = bench.prompts(5)[4][:18]
    first = bench.sequence(trunk, n=3, temperature=0)
    draws = bench.run(Chunk(first, 0, 18, True))
    assert len(draws) == 3 and len(set(draws)) == 1
    bench.check(draws[0], trunk)
    whole, open_block = first.blocks[:4], first.blocks[4]
    second = bench.sequence([*trunk, 7], blocks=whole, temperature=0)
    third = bench.sequence([*trunk, 8, 9], blocks=whole, temperature=0)
    copies = tuple((open_block, seq.blocks[4]) for seq in (second, third))
    draws = bench.run(Chunk(second, 18, 1, True), Chunk(third, 18, 2, True), copies=copies)
    bench.check(draws[0], [*trunk, 7])
    bench.check(draws[1], [*trunk, 8, 9])


def test_a_step_that_samples_nothing_draws_nothing(bench):
    assert bench.run(Chunk(bench.sequence(bench.prompts(2)[1]), 0, 4, False)) == []


def test_a_batch_invariant_draw_is_the_same_to_the_bit(make_decoder):
    model = make_decoder(batch_invariant=True)
    alone = Bench(model, "reference", batch_invariant=True)
    tokens = alone.prompts(6)[5]
    seq = alone.sequence(tokens, seed=1)
    expected = alone.run(Chunk(seq, 0, len(tokens), True))[0]
    bench = Bench(model, "reference", batch_invariant=True)
    for num_mates in (0, 1, 3, 6):
        mates = [bench.sequence(bench.prompts(4)[i % 4], id=i) for i in range(num_mates)]
        crowd = [Chunk(mate, 0, len(mate.tokens), True) for mate in mates]
        for cut in (1, 3, 17, len(tokens) - 1):
            moved = bench.sequence(tokens, seed=1)
            bench.run(Chunk(moved, 0, cut, False), *crowd)
            assert bench.run(*crowd, Chunk(moved, cut, len(tokens) - cut, True))[-1] == expected
            bench.free += moved.blocks
        for mate in mates:
            bench.free += mate.blocks


def test_time_is_split_into_forward_and_sample(bench):
    bench.run(Chunk(bench.sequence([1, 2, 3]), 0, 3, True))
    assert set(bench.runner.stats.seconds) == {"forward", "sample"}

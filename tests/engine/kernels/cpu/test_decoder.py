"""Whole steps of small random decoders against torch's decoder in float64: no further from it than torch's own bf16.

And bit for bit the same whatever shares the step, however a prompt is cut and however many threads there are.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.attention.backend import AttentionInputs
from engine.kernels.cpu.attention import KVLayout, KVPool, PagedAttention
from engine.kernels.cpu.decoder import PackedDecoder
from engine.layers.decoder import Decoder
from engine.layers.spec import DecoderSpec, RopeSpec

BLOCK_SIZE, NUM_BLOCKS = 16, 64
PLAIN = DecoderSpec(
    model_type="llama",
    vocab_size=131,
    hidden_size=96,
    intermediate_size=160,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope=RopeSpec(),
    tie_word_embeddings=True,
)
# Sizes that fill no panel, each switch once, and the head sizes of the served families.
SPECS = {
    "plain": PLAIN,
    "odd": replace(PLAIN, hidden_size=72, intermediate_size=100, head_dim=16, num_heads=7, num_kv_heads=1, tie_word_embeddings=False),
    "biases": replace(PLAIN, qkv_bias=True, o_bias=True, head_dim=48),
    "head norms": replace(PLAIN, qk_norm=True, head_dim=128, num_heads=2, num_kv_heads=2),
}


def decoder(spec: DecoderSpec) -> Decoder:
    model = Decoder(spec)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in model.named_parameters():
        spread = 0.7 / parameter.shape[-1] ** 0.5 if "_proj" in name and name.endswith("weight") else 0.5
        weights[name] = (torch.randn(parameter.shape, generator=generator) * spread + ("norm" in name)).bfloat16()
    model.load_state_dict(weights, strict=False, assign=True)
    if spec.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model


def forward(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """The plain forward pass over one sequence, in the model's dtype."""
    num_heads, num_kv_heads = model.spec.num_heads, model.spec.num_kv_heads

    def attend(layer, q_THD, k_TKD, v_TKD):
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(0, 1) for x in (k_TKD, v_TKD))
        return torch.nn.functional.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=model.spec.attention_scale
        )[0].transpose(0, 1)

    return model(torch.tensor(tokens), torch.arange(len(tokens)), attend)


class Native:
    """A packed decoder over pools of NaN; sequences get their blocks by hand."""

    def __init__(self, library, spec: DecoderSpec, *, int8: bool = False, num_threads: int = 2, model: Decoder | None = None) -> None:
        self.library, self.spec, self.num_threads = library, spec, num_threads
        self.layout = KVLayout(spec.num_kv_heads, spec.head_dim, BLOCK_SIZE)
        shape = (NUM_BLOCKS, spec.num_kv_heads, 2, BLOCK_SIZE * spec.head_dim)
        self.pools = [torch.full(shape, torch.nan, dtype=torch.bfloat16) for _ in range(spec.num_layers)]
        self.decoder = PackedDecoder(
            library, model or decoder(spec), layout=self.layout, max_tokens=400, int8=int8, num_threads=num_threads
        )
        self.free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()

    def blocks(self, num_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]

    def step(self, chunks: list[tuple[list[int], list[int], int, int]]) -> list[torch.Tensor]:
        """Chunks (tokens, blocks, start, end) -> each one's hidden states."""
        counts = [end - start for _, _, start, end in chunks]
        return list(self.rows(chunks, torch.arange(sum(counts))).split(counts))

    def rows(self, chunks: list[tuple[list[int], list[int], int, int]], wanted_M: torch.Tensor) -> torch.Tensor:
        tables = np.zeros((len(chunks), max(len(blocks) for _, blocks, _, _ in chunks)), dtype=np.int64)
        for row, (_, blocks, _, _) in zip(tables, chunks, strict=True):
            row[: len(blocks)] = blocks
        counts = [end - start for _, _, start, end in chunks]
        inputs = AttentionInputs(
            query_starts=np.cumsum([0, *counts]),
            kv_lengths=np.array([end for *_, end in chunks]),
            block_tables=tables,
            block_size=BLOCK_SIZE,
        )
        attention = PagedAttention(
            self.library,
            layout=self.layout,
            num_heads=self.spec.num_heads,
            scale=self.spec.attention_scale,
            num_threads=self.num_threads,
        )
        attention.plan(query_starts=inputs.query_starts, kv_lengths=inputs.kv_lengths, block_tables=inputs.block_tables)
        positions = np.concatenate([np.arange(start, end) for _, _, start, end in chunks])
        hidden = self.decoder.step(
            token_ids_T=torch.tensor([token for tokens, _, start, end in chunks for token in tokens[start:end]]),
            positions_T=torch.from_numpy(positions),
            slots_T=torch.from_numpy(inputs.slots(np.repeat(np.arange(len(chunks)), counts), positions)),
            wanted_M=wanted_M,
            attention=attention,
            pools=[KVPool.plain(pool) for pool in self.pools],
        )
        assert not hidden[:, self.spec.hidden_size :].any(), "padding that is not zero"
        return hidden[:, : self.spec.hidden_size]


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(PLAIN.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_step_is_as_exact_as_torch_in_bfloat16(library, spec):
    native = Native(library, spec)
    model = decoder(spec)
    exact_model = copy.deepcopy(model).double()
    exact_model.rotary.cos, exact_model.rotary.sin = model.rotary.cos.double(), model.rotary.sin.double()
    prompts = [tokens(length, seed=length) for length in (1, 37, 90, 130)]
    chunks = [(prompt, native.blocks(len(prompt)), 0, len(prompt)) for prompt in prompts]
    for prompt, hidden in zip(prompts, native.step(chunks), strict=True):
        exact = forward(exact_model, prompt)
        assert error(hidden, exact) <= 1.1 * error(forward(model, prompt), exact)
        logits = native.decoder.head(hidden)
        torch.testing.assert_close(logits, hidden.float() @ model.lm_head.weight.float().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_step_in_8_bits_is_near(library, spec):
    """Random weights have no outliers, so rounding to 1/127 of the largest costs about a hundredth of the spread a product."""
    native, model = Native(library, spec, int8=True), decoder(spec).float()
    prompt = tokens(90, seed=0)
    hidden = native.step([(prompt, native.blocks(90), 0, 90)])[0]
    exact = forward(model, prompt).double()
    bf16_error = error(Native(library, spec).step([(prompt, list(range(6)), 0, 90)])[0], exact)
    assert bf16_error < error(hidden, exact) < 0.05 * float(exact.square().mean().sqrt())


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_depends_on_its_sequence_alone(library, num_threads, int8):
    prompt = tokens(100, seed=0)
    alone = Native(library, PLAIN, int8=int8, num_threads=1)
    expected = alone.step([(prompt, alone.blocks(100), 0, 100)])[0]
    for cuts in ([0, 1, 2, 100], [0, 17, 64, 99, 100], list(range(0, 101, 10))):
        native = Native(library, PLAIN, int8=int8, num_threads=num_threads)
        blocks = native.blocks(100)
        lengths = (1, 3, 40, 200)[: len(cuts) - 2]
        mates = [(tokens(length, seed=length), native.blocks(length), 0, length) for length in lengths]
        found = [native.step([*mates, (prompt, blocks, start, end)])[-1] for start, end in pairwise(cuts)]
        assert torch.equal(torch.cat(found), expected)


def test_shared_blocks_change_nothing(library):
    trunk = tokens(64, seed=0)
    native = Native(library, PLAIN)
    shared = native.blocks(64)
    native.step([(trunk, shared, 0, 64)])
    prompts = [[*trunk, *tokens(20, seed=seed)] for seed in (1, 2, 3)]
    together = native.step([(prompt, [*shared, *native.blocks(20)], 64, 84) for prompt in prompts])
    for prompt, found in zip(prompts, together, strict=True):
        assert torch.equal(found, native.step([(prompt, native.blocks(84), 0, 84)])[0][64:])


def test_only_wanted_rows_come_out_in_the_order_asked_for(library):
    native = Native(library, PLAIN)
    chunk = (tokens(30, seed=0), native.blocks(30), 0, 30)
    every = native.step([chunk])[0]
    wanted = torch.tensor([29, 0, 7])
    assert torch.equal(native.rows([chunk], wanted), every[wanted])
    assert native.rows([chunk], wanted[:0]).shape == (0, PLAIN.hidden_size)


def test_a_row_that_overflows_when_squared_is_no_number_and_harms_nobody(library):
    model = decoder(PLAIN)
    with torch.no_grad():
        model.embed_tokens.weight[7] = 1e30
    native = Native(library, PLAIN, model=model)
    bad, good = native.step([([3, 7], native.blocks(2), 0, 2), ([3, 4], native.blocks(2), 0, 2)])
    assert bad[1].isnan().all()
    assert good.isfinite().all()

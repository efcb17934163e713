"""A step's cost against torch's own counter of operations, and against going through every token and position one by one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.flop_counter import FlopCounterMode

from engine.cost import ModelCost
from engine.layers.decoder import Decoder
from engine.layers.spec import DecoderSpec, RopeSpec
from engine.types import Chunk, StepPlan

BLOCK_SIZE = 4
SPEC = DecoderSpec(
    model_type="llama",
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope=RopeSpec(),
    tie_word_embeddings=True,
)
COST = ModelCost(
    num_token_weights=11,
    num_row_weights=7,
    num_layers=3,
    num_heads=5,
    head_dim=2,
    bytes_per_weight=2,
    kv_bytes_per_token=13,
    block_size=BLOCK_SIZE,
)


def chunk(start: int, num_tokens: int, *, blocks: list[int], samples: bool = True, num_scores: int = 0) -> Any:
    return Chunk(SimpleNamespace(blocks=blocks), start, num_tokens, samples, range(num_scores))  # type: ignore[arg-type]


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Chunks that share leading full blocks or none, with blocks reserved ahead."""
    chunks, fresh = [], iter(range(1000, 10_000))
    for _ in range(draw(st.integers(1, 6))):
        start, num_tokens = draw(st.integers(0, 20)), draw(st.integers(1, 9))
        num_shared = draw(st.integers(0, start // BLOCK_SIZE))
        num_blocks = -(-(start + num_tokens) // BLOCK_SIZE) + draw(st.integers(0, 2))
        blocks = [*range(num_shared), *(next(fresh) for _ in range(num_blocks - num_shared))]
        chunks.append(chunk(start, num_tokens, blocks=blocks, samples=draw(st.booleans()), num_scores=draw(st.integers(0, 3))))
    return StepPlan(tuple(chunks))


@given(plan=plans())
def test_each_token_and_position_counts_once(plan: StepPlan) -> None:
    flops, read = 0, set()
    for seq, start, num_tokens, samples, scores in plan.chunks:
        flops += 2 * COST.num_row_weights * (samples + len(scores))
        for position in range(start, start + num_tokens):
            flops += 2 * COST.num_token_weights
            for seen in range(position + 1):
                flops += COST.num_layers * COST.num_heads * (2 * COST.head_dim + 2 * COST.head_dim)  # its key, then its value
                read.add((seq.blocks[seen // BLOCK_SIZE], seen % BLOCK_SIZE))
    has_rows = any(samples or scores for _, _, _, samples, scores in plan.chunks)
    num_weights = COST.num_token_weights + (COST.num_row_weights if has_rows else 0)
    assert COST.of(plan) == (flops, 2 * num_weights + 13 * len(read))


def test_products_are_those_that_torch_counts() -> None:
    model = Decoder(SPEC)
    generator = torch.Generator().manual_seed(0)
    model.load_state_dict(
        {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}, strict=False, assign=True
    )
    model.lm_head.weight = model.embed_tokens.weight
    cost = replace(
        COST,
        num_token_weights=sum(weight.numel() for weight in model.layers.parameters() if weight.ndim == 2),
        num_row_weights=model.lm_head.weight.numel(),
        head_dim=0,  # attention is left to the test above
    )
    tokens = torch.arange(9)
    with FlopCounterMode(display=False) as counter:
        hidden = model(tokens, tokens, lambda layer, q, k, v: torch.zeros_like(q))
        model.logits(hidden[-2:])
    plan = StepPlan((chunk(0, 4, blocks=[0]), chunk(0, 5, blocks=[1, 2])))
    assert cost.of(plan).flops == counter.get_total_flops()


def test_embedded_model_has_the_known_cost() -> None:
    """0.212 GFLOP a token in the layers and 0.057 in the head, from its published shapes."""
    layers = 30 * (576 * 960 + 576 * 576 + 3 * 576 * 1536)
    cost = replace(COST, num_token_weights=layers, num_row_weights=576 * 49_152, num_layers=0)
    assert cost.of(StepPlan((chunk(0, 1, blocks=[0]),))).flops == pytest.approx(0.269e9, rel=2e-3)

"""The draw without a sort, against the sampler's own: the same token for the same logits, settings and number."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampling.chance import choose as choose_in_torch
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.types import NOT_A_NUMBER, NOTHING_LEFT, Request

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")

from engine.kernels.triton.sampling import choose

KINDS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1e-35},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100_000},
    {"top_p": 0.01},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "min_p": 0.01},
    {"temperature": 1.5, "top_k": 41, "top_p": 0.9},
    {"temperature": 0.7, "top_p": 0.6, "min_p": 0.2},
]


def row(id_: int, **params) -> Sequence:
    return Sequence(Request(id=id_, prompt_token_ids=[1, 2], sampling=SamplingParams(**params)), max_len=100)


CHANGES = {
    "random": lambda x: x,
    "many equal ones": lambda x: x.round(),
    "all equal": lambda x: x * 0.0,
    "most ruled out": lambda x: torch.where(x > 1.0, x, -torch.inf),
    "wide and far from zero": lambda x: x * 30 + 1000,
}


# No size at which top_p of equal ones is a whole number, which rounding may turn either way.
@pytest.mark.parametrize(("change", "vocab_size"), [*((change, 997) for change in CHANGES), ("random", 3), ("many equal ones", 4500)])
def test_draws_the_same_tokens(device, change, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = CHANGES[change](torch.randn(len(KINDS), vocab_size, generator=generator) * 3)
    chance = torch.rand(len(KINDS), generator=generator, dtype=torch.float64).tolist()
    seqs = [row(i, **kind) for i, kind in enumerate(KINDS)]
    assert choose(logits.to(device), seqs, chance).tolist() == choose_in_torch(logits, seqs, chance).tolist()


@pytest.mark.full
def test_many_draws_are_the_same(device):
    logits = torch.randn(3000, 600, generator=torch.Generator().manual_seed(9)) * 3
    seqs = [row(i, **KINDS[i % len(KINDS)]) for i in range(len(logits))]
    chance = torch.rand(len(logits), generator=torch.Generator().manual_seed(8), dtype=torch.float64).tolist()
    assert choose(logits.to(device), seqs, chance).tolist() == choose_in_torch(logits, seqs, chance).tolist()


@pytest.mark.parametrize("chance", [0.0, 1 - 2**-53])
def test_the_ends_of_chance_draw_what_is_kept(device, chance):
    logits = torch.tensor([[-5.0, 1.0, 3.0, 2.0, -torch.inf, -4.0]], device=device).repeat(3, 1)
    seqs = [row(0), row(1, top_k=2), row(2, top_p=0.9)]
    found = choose(logits, seqs, [chance] * 3).tolist()
    assert found == ([0, 2, 2] if chance == 0.0 else [5, 3, 3])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, in the interpreter
def test_a_row_that_is_not_a_number_or_has_nothing_left_fails_alone(device):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).to(device)
    seqs = [row(i, top_k=3, top_p=0.9, min_p=0.1) for i in range(4)]
    sampler = Sampler(num_valid_tokens=50, seed=0, choose=choose)
    healthy = sampler.draw(logits, seqs)
    logits[1, 4], logits[2, 4], logits[3] = math.nan, math.inf, -math.inf
    first, *broken = sampler.draw(logits, seqs)
    assert first == healthy[0]
    assert [draw.token_id for draw in broken[:2]] == [NOT_A_NUMBER] * 2
    assert broken[2].token_id in (NOT_A_NUMBER, NOTHING_LEFT)

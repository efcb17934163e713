"""Draws by chance against torch's: the same token for the same uniform number, unless that lies on the border of two."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.kernels.cpu.draw import NativeChoice
from engine.sampling.chance import choose
from engine.sampling.transforms import transform
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.types import Request

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-3, 0.1, 0.7, 1.0, 2.0, 50.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 50, 700, 10**9]),
        "top_p": st.sampled_from([1.0, 0.9987, 0.9487, 0.4903, 0.1013, 1e-6]),  # no fractions that equal logits sum to
        "min_p": st.sampled_from([0.0, 0.0, 1e-4, 0.05, 0.7, 1.0]),
    }
)


def row(params) -> Sequence:
    return Sequence(Request(id=0, prompt_token_ids=[1], sampling=SamplingParams(**params)), max_len=9)


def logits_of(seed: int, vocab_size: int, *, num_levels: int | None) -> torch.Tensor:
    """Normal logits, of ``num_levels`` values where it is given, so that many are equal; a tenth is ruled out."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(vocab_size, generator=generator)
    if num_levels is not None:
        logits = (logits * num_levels / 10).round() / num_levels * 10
    return torch.where(torch.rand(vocab_size, generator=generator) < 0.1, -torch.inf, logits)


@pytest.fixture(scope="module")
def native(library):
    return NativeChoice(library, num_threads=2)


@settings(deadline=None, max_examples=300)
@given(
    params=PARAMS, seed=st.integers(0, 999), vocab_size=st.sampled_from([2, 15, 16, 63, 700, 5003]), num_levels=st.sampled_from([None, 4])
)
def test_the_token_is_torchs(native, params, seed, vocab_size, num_levels):
    logits_RV = logits_of(seed, vocab_size, num_levels=num_levels).expand(40, -1)
    if logits_RV[0].isneginf().all():
        return
    seqs = [row(params)] * 40
    chance_R = torch.rand(40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
    drawn, expected = native(logits_RV, seqs, chance_R), choose(logits_RV, seqs, chance_R)
    if torch.equal(drawn, expected):
        return
    edge_V = torch.softmax(transform(logits_RV[:1], seqs[:1])[0].double(), dim=-1).cumsum(-1)
    for token_id, other, chance in zip(drawn.tolist(), expected.tolist(), chance_R, strict=True):
        if token_id != other:
            border = edge_V[min(token_id, other)]
            assert abs(border - chance) < 2e-5, "no rounding of sums explains another token"


@pytest.mark.parametrize("chance", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}])
def test_the_ends_of_the_distribution(native, params, chance):
    logits = logits_of(5, 700, num_levels=None)[None]
    kept = transform(logits, [row(params)])[0].softmax(-1).nonzero().squeeze(1)
    assert native(logits, [row(params)], [chance]).item() == (kept[0] if chance == 0 else kept[-1])


def test_a_row_depends_on_itself_alone(native):
    logits_RV = torch.stack([logits_of(seed, 5003, num_levels=None) for seed in range(30)])
    seqs = [row({"top_p": 0.9 if index % 2 else 1.0, "top_k": 20 * (index % 3)}) for index in range(30)]
    chance_R = [index / 30 for index in range(30)]
    alone = [native(logits_RV[i : i + 1], seqs[i : i + 1], chance_R[i : i + 1]).item() for i in range(30)]
    assert native(logits_RV, seqs, chance_R).tolist() == alone


def test_rows_that_are_no_numbers_give_some_id(native):
    logits_RV = torch.stack([torch.full((99,), value) for value in (torch.nan, torch.inf, -torch.inf)])
    for params in ({}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.5}):
        drawn = native(logits_RV, [row(params)] * 3, [0.5] * 3)
        assert ((drawn >= 0) & (drawn < 99)).all()


@pytest.mark.parametrize("vocab_size", [7, 99, 5003])
def test_a_row_with_some_numbers_and_some_that_are_none_gives_some_id(native, vocab_size):
    """The largest stands beside a NaN, in front of one and behind one, and no other token can be drawn."""
    beside, before, behind = torch.full((3, vocab_size), -torch.inf).unbind()
    beside[2:4] = torch.tensor([8.0, torch.nan])
    before[0], before[1:] = 8.0, torch.nan
    behind[:-1], behind[-1] = torch.nan, 8.0
    for params in ({}, {"top_p": 0.5}, {"top_k": 4}, {"min_p": 0.5}, {"top_p": 0.5, "min_p": 0.5}, {"top_k": 4, "min_p": 0.5}):
        drawn = native(torch.stack([beside, before, behind]), [row(params)] * 3, [0.5] * 3)
        assert ((drawn >= 0) & (drawn < vocab_size)).all()

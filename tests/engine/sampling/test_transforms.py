"""Each filter against its definition, written out for one row in plain Python; rows do not see each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from engine.sampling import transforms
from engine.sampling.transforms import transform

VOCAB = 40


def by_definition(logits: list[float], params) -> set[int]:
    """The token ids that may be drawn: temperature, min_p, top_k, top_p, each over what is left; ties by lower id."""
    scaled = [x / params.temperature for x in logits]
    weights = {i: math.exp(x - max(scaled)) for i, x in enumerate(scaled)}
    kept = sorted((i for i, w in weights.items() if w >= params.min_p), key=lambda i: (-weights[i], i))
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass = math.fsum(weights[i] for i in kept), 0.0
    for rank, i in enumerate(kept):
        mass += weights[i] / total
        if mass >= params.top_p:
            return set(kept[: rank + 1])
    return set(kept)


def settings_of_a_row():
    return st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.5, 1.0, 2.0]),
            "top_k": st.sampled_from([0, -1, 1, 3, VOCAB, 10**12]),
            "top_p": st.sampled_from([1.0, 0.93, 0.51, 1e-6]),
            "min_p": st.sampled_from([0.0, 0.013, 0.31, 1.0]),
        }
    )


@given(rows=st.lists(st.tuples(settings_of_a_row(), st.integers(0, 10**6)), min_size=1, max_size=6), levels=st.sampled_from([4, 1000]))
@settings(max_examples=150, deadline=None)
def test_keeps_what_the_definitions_keep(row, rows, levels):
    """With 4 levels nearly all logits are equal to some other."""
    steps = [torch.randint(levels, (VOCAB,), generator=torch.Generator().manual_seed(seed)) for _, seed in rows]
    logits = torch.stack(steps) * (6.0 / levels)
    seqs = [row(**params) for params, _ in rows]
    result = transform(logits, seqs)
    for r, seq in enumerate(seqs):
        params = seq.request.sampling
        assert set(result[r].isfinite().nonzero().flatten().tolist()) == by_definition(logits[r].tolist(), params)
        kept = result[r].isfinite()
        shift = (logits[r] / params.temperature - result[r])[kept]  # the distribution over what is kept is the scaled one
        torch.testing.assert_close(shift, shift[:1].expand_as(shift), rtol=0, atol=1e-5)
        assert torch.equal(transform(logits[r : r + 1], [seq])[0], result[r])


def test_the_input_is_not_changed(row):
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    transform(logits, [row(top_k=3, temperature=0.5), row()])
    assert torch.equal(logits, before)


def test_top_p_past_the_leading_ranks(row, monkeypatch):
    """A flat row needs more ranks than are looked at first; it must not matter how many those are."""
    logits = torch.stack([torch.zeros(VOCAB), torch.linspace(0, 9, VOCAB)])
    seqs = [row(top_p=0.89), row(top_p=0.89)]
    expected = transform(logits, seqs)
    assert expected[0].isfinite().sum() == 36
    monkeypatch.setattr(transforms, "_NUM_LEADING", 2)
    assert torch.equal(transform(logits, seqs), expected)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-300])
def test_tiny_temperatures_leave_the_largest(row, temperature):
    probabilities = transform(torch.tensor([[1.0, 3.0, 2.5]]), [row(temperature=temperature)]).softmax(-1)
    assert torch.equal(probabilities, torch.tensor([[0.0, 1.0, 0.0]]))

"""A beam's candidates against a sort of the whole row, with ties, bans, padding and rows that are no numbers."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from engine.rules import Rules
from engine.sampling.logprobs import candidates, portions
from engine.sampling.sampler import Sampler

VOCAB = 40


def beam(row, id=0, *, num_beams=3, **params):
    seq = row(id, temperature=0.0, num_beams=num_beams, **params)
    seq.rules = Rules(end_reasons={7: 7, 9: 9})
    return seq


@pytest.fixture
def logits():
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)).mul(4).round() / 2  # few levels: many ties


def test_the_best_come_first_and_of_equal_ones_the_lowest(row, logits):
    seqs = [beam(row, i, num_beams=2 + i) for i in range(4)]
    for seq, logits_V, found in zip(seqs, logits, candidates(logits, seqs, num_valid_tokens=VOCAB), strict=True):
        plain = logits_V.double().log_softmax(-1)
        ranked = sorted(range(VOCAB), key=lambda token_id: (-logits_V[token_id].item(), token_id))
        assert [draw.token_id for draw in found] == ranked[: seq.request.sampling.num_beams + 2], "as many end tokens may be among them"
        assert [draw.logprob for draw in found] == pytest.approx(plain[[draw.token_id for draw in found]].tolist(), abs=1e-5)
        assert all(draw.adjusted_logprob == draw.logprob for draw in found)


def test_a_bias_changes_the_rank_and_not_the_plain_logprob(row, logits):
    (found,) = candidates(logits[:1], [beam(row, logit_bias={11: 30.0})], num_valid_tokens=VOCAB)
    assert found[0].token_id == 11
    assert found[0].logprob == pytest.approx(logits[0].log_softmax(-1)[11].item())
    assert found[0].adjusted_logprob == pytest.approx(found[0].logprob + 30.0)


def test_what_is_not_allowed_and_padding_have_no_probability(row):
    logits = torch.zeros(1, VOCAB)
    logits[0, 30:] = 20.0
    (found,) = candidates(logits, [beam(row, allowed_token_ids=[4, 31, 2])], num_valid_tokens=30)
    assert [draw.token_id for draw in found if draw.adjusted_logprob > -math.inf] == [2, 4]
    assert len(found) == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_beam_that_is_not_a_number_fails_alone(row, logits, bad):
    logits[1, 3] = bad
    seqs = [row(0, temperature=0), beam(row, 1), beam(row, 2), row(3)]
    draws = Sampler(num_valid_tokens=VOCAB, seed=0).draw(logits, seqs)
    assert [draw.token_id < 0 for draw in draws] == [False, *[True] * 5, *[False] * 5, False]


@pytest.mark.parametrize("num_rows_at_once", [1, 3, 100])
def test_samples_and_beams_in_one_batch_are_what_they_are_alone(row, logits, num_rows_at_once, monkeypatch):
    monkeypatch.setattr("engine.sampling.logprobs._CACHE_BYTES", num_rows_at_once * VOCAB * 4)
    seqs = [beam(row, 0), row(1, n=2), beam(row, 2, num_beams=5, logprobs=2), row(3, temperature=0)]
    sampler = Sampler(num_valid_tokens=VOCAB, seed=0)
    alone = [draw for i, seq in enumerate(seqs) for draw in sampler.draw(logits[i : i + 1], [seq])]
    assert sampler.draw(logits, seqs) == alone


@given(counts=st.lists(st.integers(1, 9)), at_once=st.integers(0, 20))
def test_portions_hold_all_in_order_and_no_more_than_fits(counts, at_once):
    parts = [counts[rows] for rows in portions(counts, at_once=at_once)]
    assert [count for part in parts for count in part] == counts
    assert all(len(part) == 1 or sum(part) <= at_once for part in parts)
    assert all(sum(part) + after[0] > at_once for part, after in pairwise(parts)), "a portion is as large as can be"

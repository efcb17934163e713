"""Draws against exact probabilities, and a draw's independence of everything but its own row."""

from __future__ import annotations

import math

import pytest
import torch

from engine.rules import Rules
from engine.sampling.sampler import Sampler
from engine.types import NOTHING_LEFT

VOCAB = 12
CRITICAL = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 9: 33.7, 11: 37.4}  # chi-square at p = 1e-4, by degrees of freedom


def sampler(num_valid_tokens=VOCAB, seed=0):
    return Sampler(num_valid_tokens=num_valid_tokens, seed=seed)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, range(12)),
        ({"temperature": 0.6}, range(12)),
        ({"top_k": 3}, [4, 5, 6]),
        ({"top_p": 0.5}, [4, 5]),  # 0.27 + 0.24
        ({"min_p": 0.4}, [1, 2, 4, 5, 6, 7]),
        ({"temperature": 2.0, "min_p": 0.5, "top_k": 6, "top_p": 0.7}, [1, 4, 5, 6]),
    ],
)
def test_frequencies_are_the_exact_probabilities(row, params, kept):
    logits = torch.tensor([0.03, 0.11, 0.11, 0.01, 0.27, 0.24, 0.12, 0.11, 0.0, 0.0, 0.0, 0.0]).clamp(min=1e-3).log() + 5.0
    num_draws = 20_000
    draws = sampler().draw(logits.expand(num_draws, VOCAB), [row(f"row {i}", **params) for i in range(num_draws)])
    counts = torch.bincount(torch.tensor([draw.token_id for draw in draws]), minlength=VOCAB).double()
    weights = torch.zeros(VOCAB, dtype=torch.float64)
    weights[list(kept)] = (logits.double()[list(kept)] / params.get("temperature", 1.0)).exp()
    expected = num_draws * weights / weights.sum()
    assert counts[expected == 0].sum() == 0
    statistic = ((counts - expected) ** 2 / expected)[expected > 0].sum()
    assert statistic < CRITICAL[len(list(kept)) - 1]


def test_logprobs_are_those_of_the_plain_distribution(row):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    draws = sampler().draw(logits, [row(temperature=0), row(temperature=0.1, top_k=2), row(temperature=3.0)])
    for draw, plain in zip(draws, logits.double().log_softmax(-1), strict=True):
        assert draw.logprob == pytest.approx(plain[draw.token_id].item(), abs=1e-6)


def test_greedy_takes_the_lowest_of_equal_largest(row):
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 3, 11]] = 2.0
    assert sampler().draw(logits, [row(temperature=0)])[0].token_id == 3
    assert {sampler(seed=seed).draw(logits, [row(top_k=1)])[0].token_id for seed in range(20)} == {3}


@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_a_draw_is_the_same_in_every_company(row, num_rows):
    kinds = [{"temperature": 0}, {}, {"seed": 3}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.01}, {"n": 2, "temperature": 1.5}]
    vocab = 3001
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0)) * 3
    seqs = [row(i, position=(i % 3) * (i % 6 != 5), **kinds[i % 6]) for i in range(40)]
    alone = [sampler(vocab).draw(logits[i : i + 1], [seqs[i]]) for i in range(40)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(num_rows)).tolist()
    torch.manual_seed(num_rows)  # torch's own generator must not matter
    for first in range(0, 40, num_rows):
        batch = order[first : first + num_rows]
        draws = sampler(vocab).draw(logits[batch], [seqs[i] for i in batch])
        assert draws == [draw for i in batch for draw in alone[i]]


def test_samples_of_a_request_differ_and_go_on_alone(row):
    logits = torch.zeros(1, 1000)
    together = sampler(1000).draw(logits, [row("r", n=5)])
    assert len({draw.token_id for draw in together}) == 5
    # The same noise as a sample that is computed by itself, as after a preemption.
    assert sampler(1000).draw(logits, [row("r", n=5, sample_index=2, position=1)]) != together[2:3]
    assert sampler(1000).draw(logits, [row("r", seed=4, sample_index=2, position=1)]) == sampler(1000).draw(
        logits, [row("other", seed=4, sample_index=2, position=1)]
    )


def test_padding_rows_of_the_embedding_are_never_drawn(row):
    logits = torch.zeros(1, VOCAB)
    logits[0, 10:] = 30.0
    seqs = [row(0, temperature=0), *(row(i) for i in range(200))]
    assert max(draw.token_id for draw in sampler(10).draw(logits.expand(201, VOCAB), seqs)) < 10


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_a_row_that_is_not_a_number_fails_alone(row, bad, params):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    seqs = [row(i, **params) for i in range(3)]
    healthy = sampler().draw(logits, seqs)
    logits[1, 4] = bad
    first, broken, last = sampler().draw(logits, seqs)
    assert (first, last) == (healthy[0], healthy[2])
    assert broken.token_id == -1
    all_nan = sampler().draw(torch.full((1, VOCAB), math.nan), seqs[:1])
    assert all_nan[0].token_id == -1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_rules_leave_nothing_says_so(row, temperature):
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(3))
    forbidden = row("forbidden", temperature=temperature, allowed_token_ids=[4], bad_words=["spelt by token 4"])
    forbidden.rules = Rules(bad_words=((4,),))
    plain = row("plain", temperature=temperature)
    draws = Sampler(num_valid_tokens=20, seed=0).draw(logits, [forbidden, plain])
    assert draws[0].token_id == NOTHING_LEFT
    assert draws[1] == Sampler(num_valid_tokens=20, seed=0).draw(logits[1:], [plain])[0]

"""Each adjustment against transformers' logits processors or its own definition, on random rows."""

import pytest
import torch
from transformers import generation as hf

from engine.rules import Rules
from engine.sampling.adjust import adjust
from engine.sampling.sampler import Sampler
from engine.types import Draw

VOCAB = 50


@pytest.fixture
def logits():
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(7))


def test_repetition_penalty_is_transformers(row, logits):
    seq = row(position=3, repetition_penalty=1.3)
    seq.append(Draw(40, -1.0))
    expected = hf.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seq.tokens.tolist()]), logits.clone())
    torch.testing.assert_close(adjust(logits, [seq]), expected)


@pytest.mark.parametrize("penalty", [1e-39, 1e-30, 1e38])
def test_no_repetition_penalty_makes_a_number_that_is_none(row, logits, penalty):
    seq = row(repetition_penalty=penalty)  # the prompt is [1, 2]
    logits[0, 1], logits[0, 2] = 5.0, -5.0
    (draw,) = Sampler(num_valid_tokens=VOCAB, seed=0).draw(logits, [seq])
    assert not adjust(logits, [seq]).isnan().any()
    assert draw.token_id == 1 or penalty > 1, "the one likely token takes all"
    assert 0 <= draw.token_id < VOCAB


def test_presence_and_frequency_count_the_answer_only(row, logits):
    seq = row(presence_penalty=0.5, frequency_penalty=0.25)
    for token_id in (9, 9, 30):
        seq.append(Draw(token_id, -1.0))
    expected = logits.clone()
    expected[0, 9] -= 0.5 + 2 * 0.25
    expected[0, 30] -= 0.5 + 0.25
    torch.testing.assert_close(adjust(logits, [seq]), expected)


def test_logit_bias_adds_and_ignores_ids_that_do_not_exist(row, logits):
    seq = row(logit_bias={3: 5.0, VOCAB + 4: 1.0})
    expected = logits.clone()
    expected[0, 3] += 5.0
    torch.testing.assert_close(adjust(logits, [seq]), expected)


def test_allowed_ids_are_the_only_ones(row, logits):
    adjusted = adjust(logits, [row(allowed_token_ids=[4, 8, VOCAB])])
    assert adjusted[0].isfinite().nonzero().flatten().tolist() == [4, 8]
    torch.testing.assert_close(adjusted[0, [4, 8]], logits[0, [4, 8]])


@pytest.mark.parametrize(("answer", "banned"), [([], {5}), ([6], {5, 7}), ([6, 7], {5, 8}), ([1, 6, 7], {5, 8}), ([6, 1, 7], {5})])
def test_bad_words_are_never_completed(row, logits, answer, banned):
    seq = row(bad_words=["stands for the rules below"])
    seq.rules = Rules(bad_words=((5,), (6, 7), (6, 7, 8)))
    for token_id in answer:
        seq.append(Draw(token_id, -1.0))
    adjusted = adjust(logits, [seq])
    assert set(adjusted[0].isneginf().nonzero().flatten().tolist()) == banned


def test_a_bad_word_may_not_begin_in_the_prompt(row, logits):
    seq = row(bad_words=["x"])  # the prompt is [1, 2]
    seq.rules = Rules(bad_words=((1, 2, 3),))
    assert adjust(logits, [seq]).isfinite().all()


@pytest.mark.parametrize(("position", "early"), [(0, True), (2, True), (3, False)])
def test_min_tokens_holds_back_every_end_token(row, logits, position, early):
    seq = row(position=position, min_tokens=3)
    seq.rules = Rules(end_reasons={2: 2, 7: 7})
    assert set(adjust(logits, [seq])[0].isneginf().nonzero().flatten().tolist()) == ({2, 7} if early else set())


def test_rows_that_ask_for_nothing_are_untouched(row, logits):
    assert adjust(logits, [row()]) is logits
    both = adjust(logits.repeat(2, 1), [row(logit_bias={1: 3.0}), row()])
    assert torch.equal(both[1], logits[0])

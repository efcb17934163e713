"""Masks and endings against plain enumeration: what a finite language and a small vocabulary say by themselves."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer as Backend, decoders, models

from engine.grammar.compiler import Grammars
from engine.grammar.spec import Grammar, GrammarError
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.tokenizer import Tokenizer
from engine.types import Request

WORDS = ["a", "b", "c", "ab", "bc", "aab", "cc", "cab"]
END = len(WORDS)


@pytest.fixture(scope="module")
def tiny():
    """Nine tokens: a few texts over three letters, and an end token."""
    merges = [("a", "b"), ("b", "c"), ("a", "ab"), ("c", "c"), ("c", "ab")]
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate([*WORDS, "<|end|>"])}, merges=merges))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Grammars(Tokenizer(backend, special_tokens={"eos_token": "<|end|>"}), vocab_size=END + 1)


def fewest(text: str) -> int:
    """Tokens that spell ``text``, by trying all first tokens."""
    return 0 if not text else 1 + min(fewest(text[len(word) :]) for word in WORDS if text.startswith(word))


def start(grammars, grammar, budget):
    return grammars.start(grammar, sampling=SamplingParams(max_tokens=budget), budget=budget)


def shortest(grammars, grammar) -> int:
    """The least budget that is not refused."""
    for budget in itertools.count(1):
        try:
            start(grammars, grammar, budget)
        except GrammarError:
            continue
        return budget


@pytest.mark.parametrize("pattern", ["(ab)*c", "a+b?cc", "(aab|c){2,3}", "c?(bc|aabaab)", "(a|bb|cab)(c|ab)b"])
def test_the_shortest_answer_is_the_shortest_of_all_token_strings(tiny, pattern):
    lengths = range(1, 7)
    expected = next(n for n in lengths if any(re.fullmatch(pattern, "".join(words)) for words in itertools.product(WORDS, repeat=n)))
    assert shortest(tiny, Grammar.regex(pattern)) == expected + 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=6), slack=st.sampled_from([0, 1, 2, 3, 8]), data=st.data()
)
def test_tokens_that_fit_are_those_from_which_a_choice_can_still_be_spelt(tiny, words, slack, data):
    grammar = Grammar.choice(words)
    left = shortest(tiny, grammar) + slack
    assert left - slack >= min(fewest(word) for word in words) + 1
    state, text = start(tiny, grammar, left), ""
    while True:
        fitting = {i for i, token in enumerate(WORDS) if _ways_to_end(words, text + token) <= left - 1}
        if text in words:
            fitting.add(END)
        found = {i for i in range(END + 1) if state.fits(i)}
        assert found <= fitting
        assert state.closing_token_id in found
        assert found == fitting or slack < 8, "with room enough for every choice"
        # Of what fits the mask may leave out all but one: the shortest ending, or a text that must come in its usual tokens.
        masked = set(np.flatnonzero(state.allowed()).tolist())
        legal = {i for i, token in enumerate(WORDS) if any(word.startswith(text + token) for word in words)} | (
            {END} if text in words else set()
        )
        assert masked <= legal
        assert len(masked) == 1 or masked == legal
        token = data.draw(st.sampled_from(sorted(masked & found or {state.closing_token_id})))
        if token == END:
            break
        state.advance(token)
        text, left = text + WORDS[token], left - 1
    assert text in words


def _ways_to_end(words, text) -> float:
    """Tokens of the shortest ending after ``text``, the end token included."""
    return min((fewest(word[len(text) :]) + 1 for word in words if word.startswith(text)), default=float("inf"))


def test_forks_go_their_own_ways(tiny):
    parent = start(tiny, Grammar.choice(["abc", "cab"]), 5)
    child = parent.fork()
    parent.advance(WORDS.index("a"))
    child.advance(WORDS.index("c"))
    assert [WORDS[i] for i in range(END) if parent.fits(i)] == ["b", "bc"]
    assert [WORDS[i] for i in range(END) if child.fits(i)] == ["a", "ab"]


def test_equal_grammars_are_compiled_once(tiny):
    for _ in range(3):
        start(tiny, Grammar.regex("a{3}b"), 9)
    before = tiny._compiled.cache_info().misses
    start(tiny, Grammar.regex("a{3}b"), 9)
    assert tiny._compiled.cache_info().misses == before


def row(grammars, grammar, *, budget, **sampling) -> Sequence:
    request = Request(id=1, prompt_token_ids=[0], sampling=SamplingParams(max_tokens=budget, **sampling), grammar=grammar)
    seq = Sequence(request, max_len=1 + budget)
    seq.grammar = grammars.start(grammar, sampling=request.sampling, budget=budget)
    return seq


def test_a_token_that_does_not_fit_gives_its_share_to_the_others(tiny):
    """Draws against exact probabilities: "c" begins a choice that is too long, so "a" and "b" share all by their odds."""
    num_draws = 4000
    seq = row(tiny, Grammar.choice(["a", "b", "cacacaca"]), budget=3, n=num_draws)
    logits = torch.full((1, END + 1), 1.0)
    logits[0, WORDS.index("b")] = 2.0
    logits[0, WORDS.index("c")] = 2.5
    counts = Counter(draw.token_id for draw in Sampler(num_valid_tokens=END + 1, seed=3).draw(logits, [seq]))
    assert set(counts) == {WORDS.index("a"), WORDS.index("b")}
    expected = num_draws * torch.softmax(torch.tensor([1.0, 2.0]), 0)
    chi_square = sum((counts[WORDS.index(word)] - float(expected[i])) ** 2 / float(expected[i]) for i, word in enumerate("ab"))
    assert chi_square < 15.1  # one degree of freedom, p = 1e-4


def test_the_grammar_wins_over_rules_that_leave_nothing(tiny):
    seq = row(tiny, Grammar.choice(["a", "b"]), budget=5, allowed_token_ids=[WORDS.index("c")], temperature=0.0)
    [draw] = Sampler(num_valid_tokens=END + 1, seed=0).draw(torch.randn(1, END + 1), [seq])
    assert WORDS[draw.token_id] in ("a", "b")


def test_a_row_without_a_grammar_is_not_touched(tiny):
    free = Sequence(Request(id=2, prompt_token_ids=[0], sampling=SamplingParams(temperature=0.0)), max_len=9)
    logits = torch.randn(2, END + 1, generator=torch.Generator().manual_seed(5))
    bound = row(tiny, Grammar.choice(["a"]), budget=5, temperature=0.0)
    draws = Sampler(num_valid_tokens=END + 1, seed=0).draw(logits, [free, bound])
    assert [draw.token_id for draw in draws] == [int(logits[0].argmax()), WORDS.index("a")]
    torch.testing.assert_close(torch.tensor(draws[1].logprob), torch.log_softmax(logits[1], 0)[WORDS.index("a")])


def test_a_row_of_nan_fails_alone(tiny):
    bound = row(tiny, Grammar.choice(["a"]), budget=5)
    logits = torch.stack([torch.full((END + 1,), torch.nan), torch.zeros(END + 1)])
    broken, good = Sampler(num_valid_tokens=END + 1, seed=0).draw(logits, [bound, row(tiny, Grammar.choice(["b"]), budget=5)])
    assert broken.token_id == -1
    assert good.token_id == WORDS.index("b")

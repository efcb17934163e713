"""The tally against counting anew, with forks that go different ways."""

from collections import Counter

from hypothesis import given, strategies as st

from engine.tally import Tally

TOKENS = st.lists(st.integers(0, 6))


def numbers(tally: Tally) -> dict[int, int]:
    return dict(zip(tally.token_ids, tally.counts, strict=True))


@given(prompt=TOKENS, answer=TOKENS, left=TOKENS, right=TOKENS)
def test_it_counts_the_answer_and_knows_the_prompt(prompt, answer, left, right):
    tally = Tally(prompt)
    for token_id in answer:
        tally.add(token_id)
    fork = tally.fork()
    for branch, tokens in ((tally, left), (fork, right)):
        for token_id in tokens:
            branch.add(token_id)
        expected = Counter([*answer, *tokens])
        assert numbers(branch) == {token_id: expected[token_id] for token_id in {*prompt, *answer, *tokens}}
        assert len(branch.token_ids) == len(set(branch.token_ids))

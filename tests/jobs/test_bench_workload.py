"""The synthetic workload has exactly the shape that it was asked for, and what cannot be one is refused by its key."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from engine import SamplingParams
from jobs._app import compose
from jobs._bench.config import BenchConfig
from jobs._bench.workload import Lengths, Workload, synthetic
from jobs.bench import _points

lengths = st.tuples(st.integers(1, 30), st.integers(0, 9)).map(lambda pair: Lengths(pair[0], sum(pair)))


def as_text(found: Lengths) -> int | str:
    return found.low if found.low == found.high else f"{found.low}-{found.high}"


@given(rows=st.integers(1, 20), shared=st.integers(0, 40), own=lengths, out=lengths, prefixes=st.integers(1, 4), seed=st.integers(0, 9))
def test_synthetic_workload_has_its_shape(rows: int, shared: int, own: Lengths, out: Lengths, prefixes: int, seed: int) -> None:
    prompt = as_text(Lengths(shared + own.low, shared + own.high))
    workload = Workload(rows=rows, prompt_tokens=prompt, shared_tokens=shared, prefixes=prefixes, max_tokens=as_text(out))
    sampling = SamplingParams(temperature=0.5, min_tokens=1, max_tokens=99)
    requests = list(synthetic(workload, vocab_size=50, sampling=sampling, seed=seed))
    assert requests == list(synthetic(workload, vocab_size=50, sampling=sampling, seed=seed))
    assert len(requests) == rows == len({request.id for request in requests})
    assert all(shared + own.low <= len(request.prompt_token_ids) <= shared + own.high for request in requests)
    assert all(0 <= token < 50 for request in requests for token in request.prompt_token_ids)
    assert all(out.low <= request.sampling.max_tokens <= out.high and request.sampling.ignore_eos for request in requests)
    assert all(request.sampling.temperature == 0.5 for request in requests)
    for first in range(prefixes):
        assert len({tuple(request.prompt_token_ids[:shared]) for request in requests[first::prefixes]}) <= 1


def test_every_length_of_a_range_comes_up() -> None:
    workload = Workload(rows=2000, prompt_tokens="2-5", shared_tokens=1, prefixes=1, max_tokens="1-3")
    requests = list(synthetic(workload, vocab_size=50, sampling=SamplingParams(), seed=0))
    prompts = Counter(len(request.prompt_token_ids) for request in requests)
    answers = Counter(request.sampling.max_tokens for request in requests)
    # A count is binomial: 500 or 667 of 2,000, with a standard deviation under 22; six of them is beyond chance.
    assert set(prompts) == {2, 3, 4, 5} and all(abs(count - 500) < 6 * 22 for count in prompts.values())
    assert set(answers) == {1, 2, 3} and all(abs(count - 2000 / 3) < 6 * 22 for count in answers.values())


def test_another_seed_asks_for_other_tokens() -> None:
    workload = Workload(rows=2, prompt_tokens=9, shared_tokens=4, prefixes=1, max_tokens=1)
    first, second = (list(synthetic(workload, vocab_size=50, sampling=SamplingParams(), seed=seed)) for seed in (0, 1))
    assert first[0].prompt_token_ids != second[0].prompt_token_ids


def test_a_limit_that_leaves_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^limit: 0 must be 1 or more"):
        compose("bench", ["limit=0"], kind=BenchConfig)


def test_settings_that_would_end_an_answer_are_refused() -> None:
    workload = Workload(rows=1, prompt_tokens=2, shared_tokens=0, prefixes=1, max_tokens=1)
    with pytest.raises(ValueError, match=r"^sampling\.stop_token_ids: would end answers"):
        list(synthetic(workload, vocab_size=50, sampling=SamplingParams(stop_token_ids=(3,)), seed=0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench.shared_tokens=256"], "bench.shared_tokens: 256 is not in 0..255"),
        (["bench.prompt_tokens=64-256"], "bench.shared_tokens: 128 is not in 0..63"),
        (["bench.rows=0"], "bench.rows: 0 must be 1 or more"),
        (["bench.prefixes=0"], "bench.prefixes: 0 must be 1 or more"),
        (["bench.max_tokens=0"], "bench.max_tokens: 0 must be 1 or more"),
        (["bench.max_tokens=9-3"], "bench.max_tokens: 9-3 must be 1 or more, the smaller number first"),
        (["bench.prompt_tokens=many"], "bench.prompt_tokens: 'many' is not a length"),
        (["bench.repeat=0"], "bench.repeat: 0 must be 1 or more"),
        (["bench.repeat=1,2"], "bench.repeat: is one for the whole benchmark"),
        (["bench.output="], "bench.output: is empty"),
        (["bench.rows=4", "input.path=x.jsonl"], "bench.rows: shapes the synthetic workload, and input.path names a file"),
        (["engine.max_num_seqs=4,x"], "engine.max_num_seqs: value 'x'"),
        (["prompt.system=Be kind, be brief"], "prompt.system: a prompt is not swept over"),
        (["bench.lenght=3"], "bench.lenght: unknown key"),
        (["output.path=x"], "output: unknown key"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_their_key(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        _points(words)


def test_points_are_all_combinations_in_order() -> None:
    found = _points(["engine.max_num_seqs=8,16", "bench.rows=3", "model.weights=native,int8"])
    assert [point.own for point in found] == [
        {"engine.max_num_seqs": seqs, "model.weights": weights} for seqs in ("8", "16") for weights in ("native", "int8")
    ]
    assert [(p.config.engine.max_num_seqs, p.config.model.weights) for p in found] == [
        (seqs, weights) for seqs in (8, 16) for weights in ("native", "int8")
    ]
    assert all(point.config.bench.rows == 3 for point in found)
    (alone,) = _points([])
    assert alone.own == {} and alone.config == compose("bench", [], kind=BenchConfig)

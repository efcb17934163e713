"""The main test of the host side: whatever runs beside it, a request's answer is the one it gets alone (I4)."""

from hypothesis import given, settings, strategies as st

from engine.types import Request, SamplingParams

SETTINGS = settings(max_examples=400, deadline=None)


@st.composite
def workloads(draw):
    """Prompts over few tokens that share prefixes, on pools that are scarce, with small blocks and budgets."""
    block_size = draw(st.integers(1, 5))
    max_num_seqs = draw(st.integers(1, 8))
    stems = draw(st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=14), min_size=1, max_size=3))
    rows = draw(
        st.lists(
            st.tuples(st.sampled_from(stems), st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 12)),
            min_size=1,
            max_size=14,
        )
    )
    requests = [
        Request(id=i, prompt_token_ids=[*stem, *tail], sampling=SamplingParams(max_tokens=max_tokens))
        for i, (stem, tail, max_tokens) in enumerate(rows)
    ]
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    return requests, {
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + draw(st.integers(0, 12)),
        "max_num_seqs": max_num_seqs,
        "budget": max_num_seqs + draw(st.integers(0, 20)),
        "prefix_cache": draw(st.booleans()),
    }


@SETTINGS
@given(workloads())
def test_answers_do_not_depend_on_what_else_runs(oracle_engine, answer_alone, workload):
    requests, shape = workload
    engine = oracle_engine(**shape)
    done = list(engine.generate(iter(requests)))
    assert {c.request_id: c.token_ids for c in done} == {r.id: answer_alone(r) for r in requests}
    assert len(done) == len(requests)
    assert engine.scheduler.kv.num_held == 0, "every block is free or cached when nothing runs"
    stats = engine.stats
    assert stats.num_prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    computed = stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_recomputed_tokens + stats.num_generated_tokens
    # The token that ends an answer is drawn and never computed.
    assert engine.runner.num_computed == stats.num_step_tokens == computed - len(requests)


@SETTINGS
@given(workloads(), st.integers(0, 5))
def test_second_pass_over_a_warm_cache_gives_the_same(oracle_engine, answer_alone, workload, rotate):
    requests, shape = workload
    engine = oracle_engine(**shape)
    list(engine.generate(requests))
    again = requests[rotate:] + requests[:rotate]
    assert {c.request_id: c.token_ids for c in engine.generate(again)} == {r.id: answer_alone(r) for r in requests}


def test_scarce_pool_preempts_and_loses_nothing(oracle_engine, answer_alone):
    requests = [Request(id=i, prompt_token_ids=[1 + i % 6] * 8, sampling=SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(8)]
    engine = oracle_engine(num_blocks=14, block_size=4)
    answers = {c.request_id: c.token_ids for c in engine.generate(requests)}
    assert engine.stats.num_preemptions > 0
    assert all(len(answers[r.id]) == 40 for r in requests)
    ample = oracle_engine(num_blocks=400, block_size=4)
    assert {c.request_id: c.token_ids for c in ample.generate(requests)} == answers
    assert ample.stats.num_preemptions == 0

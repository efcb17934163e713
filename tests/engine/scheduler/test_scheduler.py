"""The scheduler's own promises: twins are computed once, what never fits is refused, aborts give everything back."""

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.sampling_params import SamplingParams
from engine.types import Draw, Request

SHARED = [1 + i % 50 for i in range(256)]


def twins(num: int, *, max_tokens: int = 4) -> list[Request]:
    return [
        Request(id=i, prompt_token_ids=[*SHARED, *([60 + i] * 8)], sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        for i in range(num)
    ]


def test_a_shared_prefix_is_computed_once_even_when_all_arrive_together(oracle_engine):
    engine = oracle_engine(num_blocks=400, block_size=16, budget=512, max_num_seqs=64, vocab_size=1000)
    done = list(engine.generate(twins(64)))
    assert engine.stats.num_prompt_tokens - engine.stats.num_cached_tokens == 256 + 64 * 8
    assert sorted(c.num_cached_tokens for c in done) == [0] + [256] * 63


def test_waiting_for_a_twin_ends_when_the_twin_is_aborted(oracle_engine):
    engine = oracle_engine(num_blocks=400, block_size=16, budget=32, max_num_seqs=4)
    for request in twins(2):
        engine.submit(request)
    engine.step()
    assert [seq.request.id for seq in engine.scheduler.running] == [0], "the second waits for the first one's blocks"
    engine.scheduler.abort(0)
    engine.step()
    assert [seq.request.id for seq in engine.scheduler.running] == [1]


def test_who_waits_for_a_twin_does_not_hold_up_others(oracle_engine):
    engine = oracle_engine(num_blocks=400, block_size=16, budget=512, max_num_seqs=8)
    for request in (
        *twins(3),
        Request(id="other", prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=3, ignore_eos=True)),
        *twins(5)[3:],
    ):
        engine.submit(request)
    engine.step()
    assert {seq.request.id for seq in engine.scheduler.running} == {0, "other"}
    engine.step()
    assert {seq.request.id for seq in engine.scheduler.running} == {0, 1, 2, 3, 4, "other"}


def test_a_generator_that_is_closed_gives_everything_back(oracle_engine):
    engine = oracle_engine(num_blocks=400, block_size=16, max_num_seqs=8)
    answers = engine.generate(twins(40))
    next(answers)
    assert engine.scheduler.has_work
    answers.close()
    assert not engine.scheduler.has_work
    assert engine.scheduler.kv.num_held == 0


def test_every_prompt_leaves_a_token_to_compute(oracle_engine):
    """A prompt that is cached to its last token still computes one: lengths around block borders, each twice."""
    engine = oracle_engine(num_blocks=100, block_size=16, vocab_size=1000)
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    for length in range(1, 50):
        prompt = list(range(1, length + 1))
        answers = [next(engine.generate([Request(id=0, prompt_token_ids=prompt, sampling=sampling)])) for _ in range(2)]
        assert answers[0].token_ids == answers[1].token_ids
        part = (length - 1) % 16
        assert answers[1].num_cached_tokens == length - 1 - (part if part < 4 else 0), "a part under a quarter is not worth a copy"


def test_log_probabilities_in_flight_are_bounded(oracle_engine, monkeypatch):
    """10 answers of 8 tokens with 5 log probabilities each, and room for 100: two at once; the greedy one goes alone."""
    monkeypatch.setattr("engine.scheduler.scheduler.MAX_LOGPROBS", 100)
    engine = oracle_engine(num_blocks=400, block_size=16, max_num_seqs=8)
    asked = [Request(id=i, prompt_token_ids=[i + 1], sampling=SamplingParams(max_tokens=8, logprobs=5, ignore_eos=True)) for i in range(10)]
    asked.append(Request(id="greedy", prompt_token_ids=[40], sampling=SamplingParams(max_tokens=8, n=2, logprobs=50, ignore_eos=True)))
    plain = [Request(id=f"plain {i}", prompt_token_ids=[i + 1], sampling=SamplingParams(max_tokens=8)) for i in range(4)]
    done = set()
    for request in (*asked, *plain):
        engine.submit(request)
    while engine.scheduler.has_work:
        done |= {completion.request_id for completion in engine.step()}
        held = {seq.request.id for seq in engine.scheduler.running if seq.request.sampling.logprobs}
        assert len(held) <= (1 if "greedy" in held else 2)
    assert done == {request.id for request in (*asked, *plain)}


@pytest.mark.parametrize(("num_tokens", "code"), [(0, "empty_prompt"), (64, "too_long"), (500, "too_long")])
def test_what_can_never_fit_is_refused_at_once(oracle_engine, num_tokens, code):
    engine = oracle_engine(num_blocks=4, block_size=16)
    requests = [Request(id="bad", prompt_token_ids=[1] * num_tokens), *(Request(id=i, prompt_token_ids=[1, 2, 3]) for i in range(3))]
    done = {c.request_id: c for c in engine.generate(requests)}
    assert done["bad"].finish_reason == "error" and done["bad"].error_code == code
    assert done["bad"].num_prompt_tokens == num_tokens
    assert all(done[i].finish_reason in ("stop", "length") for i in range(3))


@pytest.mark.parametrize("token_id", [-1, 1000, 2**40])
def test_a_token_id_that_the_model_lacks_is_refused(oracle_engine, token_id):
    engine = oracle_engine(num_blocks=4, block_size=16)
    refused = engine.submit(Request(id=0, prompt_token_ids=[1, token_id, 2]))
    assert refused.error_code == "bad_row"
    assert "999" in refused.error_message


@pytest.mark.parametrize(
    ("key", "of"),
    [
        ("allowed_token_ids", lambda token_id: [3, token_id, 4]),
        ("logit_bias", lambda token_id: {3: 1.0, token_id: -1.0}),
        ("logprob_token_ids", lambda token_id: [token_id, 3]),
        ("stop_token_ids", lambda token_id: [token_id]),
    ],
)
def test_settings_that_name_a_token_that_the_model_lacks_are_refused(oracle_engine, key, of):
    engine = oracle_engine(num_blocks=100, block_size=16)
    last, beyond, far = (SamplingParams(**{key: of(token_id)}, max_tokens=2) for token_id in (999, 1000, 2**31 - 1))
    settings = [beyond, last, beyond, beyond, far, last]
    done = {c.request_id: c for c in engine.generate(Request(id=i, prompt_token_ids=[1, 2], sampling=s) for i, s in enumerate(settings))}
    assert [done[i].error_code for i in range(6)] == ["bad_params", None, "bad_params", "bad_params", "bad_params", None]
    assert done[0].error_message == f"sampling.{key}: 1000 is not in 0..999, the model's vocabulary"
    assert f"sampling.{key}: {2**31 - 1} " in done[4].error_message


def test_a_refusal_for_the_pool_names_both_numbers(oracle_engine):
    engine = oracle_engine(num_blocks=4, block_size=16, max_model_len=4096)
    refused = engine.submit(Request(id=0, prompt_token_ids=[1] * 100))
    assert "7 KV blocks" in refused.error_message and "has 4" in refused.error_message


def test_max_tokens_over_the_context_is_cut_there(oracle_engine):
    engine = oracle_engine(num_blocks=8, block_size=16, vocab_size=1000)
    request = Request(id=0, prompt_token_ids=[1] * 100, sampling=SamplingParams(max_tokens=100_000, ignore_eos=True))
    (done,) = engine.generate([request])
    assert (done.finish_reason, done.stop_reason, len(done.token_ids)) == ("length", "context", 28)


def test_end_tokens_stop_unless_ignored(oracle_engine):
    stop = SamplingParams(max_tokens=50, stop_token_ids=[3, 4, 5, 6])
    engine = oracle_engine(num_blocks=8, block_size=16)
    (done,) = engine.generate([Request(id=0, prompt_token_ids=[1, 2], sampling=stop)])
    assert done.finish_reason == "stop" and done.stop_reason == done.token_ids[-1]
    forced = SamplingParams(max_tokens=50, ignore_eos=True)
    (done,) = engine.generate([Request(id=0, prompt_token_ids=[1, 2], sampling=forced)])
    assert done.finish_reason == "length" and done.stop_reason is None and len(done.token_ids) == 50


def test_a_row_that_is_not_a_number_fails_alone(oracle_engine):
    engine = oracle_engine(num_blocks=100, block_size=4, vocab_size=1000)
    run = engine.runner.run

    def is_broken(seq):
        return seq.request.id == 1 and seq.num_generated == 2

    def poisoned(plan):
        draws = run(plan)
        return [Draw(-1, 0.0) if is_broken(chunk.seq) else draw for chunk, draw in zip(plan.sampling, draws, strict=True)]

    engine.runner.run = poisoned
    requests = [
        Request(id=i, prompt_token_ids=[1, 2, 3, 4, 5 + i], sampling=SamplingParams(max_tokens=8, ignore_eos=True)) for i in range(3)
    ]
    done = {c.request_id: c for c in engine.generate(requests)}
    assert (done[1].finish_reason, done[1].error_code) == ("error", "numerical_error")
    assert [len(done[i].token_ids) for i in range(3)] == [8, 0, 8]
    assert engine.scheduler.kv.num_held == 0


def test_closing_the_iterator_aborts_what_is_in_flight(oracle_engine):
    engine = oracle_engine(num_blocks=100, block_size=4, vocab_size=1000)
    completions = engine.generate(twins(20))
    next(completions)
    completions.close()
    assert not engine.scheduler.has_work
    assert engine.scheduler.kv.num_held == 0


def test_the_source_is_pulled_little_by_little(oracle_engine):
    pulled = 0

    def source():
        nonlocal pulled
        for request in twins(1000, max_tokens=1):
            pulled += 1
            yield request

    engine = oracle_engine(num_blocks=400, block_size=16, budget=512, max_num_seqs=8, vocab_size=1000)
    next(completions := engine.generate(source()))
    assert pulled <= 10 * 8, "the first answer comes long before the input is read"
    completions.close()


def test_a_source_may_say_not_now(oracle_engine):
    finished = 0

    def one_at_a_time():
        for i, request in enumerate(twins(5)):
            while finished < i:
                yield None
            yield request

    engine = oracle_engine(num_blocks=400, block_size=16, budget=512, vocab_size=1000)
    for _ in engine.generate(one_at_a_time()):
        finished += 1
        assert len(engine.scheduler.running) == 0
    assert finished == 5


@pytest.mark.parametrize(
    ("shape", "num_beams", "numbers"), [({"max_num_seqs": 4}, 5, ("5", "4")), ({"max_num_seqs": 1000}, 1000, ("1001", "1000"))]
)
def test_more_beams_than_can_run_or_be_told_apart_are_refused(oracle_engine, shape, num_beams, numbers):
    engine = oracle_engine(num_blocks=100, block_size=4, budget=1000, **shape)
    sampling = SamplingParams(temperature=0.0, num_beams=num_beams)
    refused = engine.submit(Request(id=0, prompt_token_ids=[1, 2], sampling=sampling))
    assert refused.error_code == "bad_params"
    assert "sampling.num_beams" in refused.error_message and all(number in refused.error_message for number in numbers)


def test_a_search_waits_for_all_its_places(oracle_engine):
    engine = oracle_engine(num_blocks=400, block_size=4, max_num_seqs=6)
    for i in range(3):
        sampling = SamplingParams(max_tokens=8, temperature=0.0, num_beams=3, ignore_eos=True)
        engine.submit(Request(id=i, prompt_token_ids=[1 + i, 2, 3], sampling=sampling))
    for _ in range(8):
        engine.step()
        assert {seq.request.id for seq in engine.scheduler.running} <= {0, 1}
    engine.step()
    assert {seq.request.id for seq in engine.scheduler.running} == {2}
    assert engine.stats.num_recomputed_tokens == engine.stats.num_preemptions == 0


def test_a_search_with_a_broken_beam_fails_once(oracle_engine):
    engine = oracle_engine(num_blocks=100, block_size=4)
    run = engine.runner.run

    def poisoned(plan):
        broken = {chunk.seq for chunk in plan.chunks if chunk.seq.num_generated == 2}
        owners = [chunk.seq for chunk in plan.chunks for _ in range(chunk.seq.num_draws)]
        return [Draw(-1, 0.0) if seq in broken else draw for seq, draw in zip(owners, run(plan), strict=True)]

    engine.runner.run = poisoned
    sampling = SamplingParams(max_tokens=8, temperature=0.0, num_beams=3, ignore_eos=True)
    (done,) = engine.generate([Request(id=0, prompt_token_ids=[1, 2, 3], sampling=sampling)])
    assert done.error_code == "numerical_error"
    assert engine.scheduler.kv.num_held == 0


def test_a_step_that_plans_nothing_is_named(oracle_engine):
    engine = oracle_engine(num_blocks=10, block_size=4)
    engine.scheduler.waiting.candidates = lambda **_: []
    engine.submit(Request(id="stuck", prompt_token_ids=[1, 2, 3]))
    with pytest.raises(RuntimeError, match=r"no progress.* 1 waiting.*request 'stuck', 0 of its 3 tokens"):
        engine.step()


def test_going_round_in_circles_is_named(oracle_engine):
    """A sequence that is preempted after every chunk computes for ever and draws nothing."""
    engine = oracle_engine(num_blocks=10, block_size=4, budget=8, prefix_cache=False)
    scheduler = engine.scheduler
    schedule = scheduler.schedule

    def preempt_all_first():
        while scheduler.running:
            scheduler._preempt(scheduler.running[-1])
        return schedule()

    scheduler.schedule = preempt_all_first
    with pytest.raises(RuntimeError, match="no progress"):
        list(engine.generate([Request(id="round", prompt_token_ids=[1] * 20)]))


class PoolMachine(RuleBasedStateMachine):
    """Random submits, steps and aborts: the pool's check passes after each, nothing is held at the end, safe never preempts."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(8, 24),
        prefix_cache=st.booleans(),
        budget=st.integers(4, 24),
        admission=st.sampled_from(["safe", "optimistic"]),
    )
    def start(self, **shape):
        self.engine = self.make(**shape, max_num_seqs=4, max_model_len=24)
        self.is_safe = shape["admission"] == "safe"
        self.num_submitted = 0
        self.live: set[int] = set()

    @rule(
        stem=st.integers(0, 2),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=5),
        max_tokens=st.integers(1, 20),
        forks=st.sampled_from([{}, {"n": 2}, {"n": 3}, {"num_beams": 2}, {"num_beams": 4, "n": 2, "early_stopping": "never"}]),
    )
    def submit(self, stem, tail, max_tokens, forks):
        prompt = [1, 2, 3, 1, 2, 3, 1, 2][: 4 * stem] + tail
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **forks)
        request = Request(id=self.num_submitted, prompt_token_ids=prompt, sampling=sampling)
        if self.engine.submit(request) is None:
            self.live.add(self.num_submitted)
        self.num_submitted += 1

    @precondition(lambda self: self.live)
    @rule()
    def step(self):
        self.live -= {completion.request_id for completion in self.engine.step()}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.engine.scheduler.abort(request_id)
        assert not self.engine.scheduler.abort(request_id), "it is gone"
        self.live.remove(request_id)

    @invariant()
    def every_block_is_one_thing(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.kv.check(self.engine.scheduler.running)
            assert self.engine.scheduler.has_work == bool(self.live)
            assert not self.is_safe or self.engine.stats.num_preemptions == 0

    def teardown(self):
        if hasattr(self, "engine"):
            while self.live:
                self.step()
            assert self.engine.scheduler.kv.num_held == 0


def test_pool_state_machine(oracle_engine):
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("PoolMachineOnOracle", (PoolMachine,), {"make": staticmethod(oracle_engine)})
    run_state_machine_as_test(machine, settings=settings(max_examples=1000, stateful_step_count=15, deadline=None))

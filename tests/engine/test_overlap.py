"""The host one step behind: the answers are those of the synchronous loop, whatever ends, waits, forks or gives way meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import pytest
from hypothesis import given, settings

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig
from engine.overlap import OverlappedEngine
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.types import Draw, Request, StepPlan
from tests.engine.test_oracle import by_request, workloads
from tests.engine.test_whole_engine import answers, mixed, numbers

# Settings that let a row go on before its last token is known.
PLAIN = {"n": 1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "prompt_logprobs": None, "bad_words": ()}


@dataclass
class Landed:
    plan: StepPlan
    results: list[Draw]

    def draws(self):
        return self.results


class Device:
    """Computes a step when it is launched; a token that the host has not been told it takes from the step before."""

    def __init__(self, oracle):
        self.oracle = oracle
        self.drawn: dict[Sequence, int] = {}
        self.ends: dict[Sequence, int] = {}
        self.num_ahead = 0

    def launch(self, plan):
        tokens_of = {chunk.seq: chunk.seq.tokens.tolist() for chunk in plan.chunks}
        for seq, start, num_tokens, samples, _ in plan.chunks:
            assert start in (seq.num_computed, self.ends.get(seq)), "a step goes on where the one before it ends"
            if start + num_tokens > len(tokens_of[seq]):
                tokens_of[seq].append(self.drawn[seq])
            assert samples == (seq.draws and start + num_tokens == len(tokens_of[seq]))
            assert seq.num_generated == len(tokens_of[seq]) - seq.num_prompt, "what draws depend on counts the unknown token"
        self.num_ahead += any(len(tokens) > len(seq.tokens) for seq, tokens in tokens_of.items())
        draws = self.oracle.compute(plan, tokens_of)
        results = iter(draws)
        self.drawn, self.ends = {}, {chunk.seq: chunk.start + chunk.num_tokens for chunk in plan.chunks}
        for chunk in plan.chunks:
            found = list(islice(results, len(chunk.scores) + (chunk.seq.num_draws if chunk.samples else 0)))
            if chunk.samples:
                self.drawn[chunk.seq] = found[-1].token_id
        return Landed(plan, draws)


@pytest.fixture(scope="session")
def overlapped(oracle_engine):
    """``overlapped(...)``: the oracle's engine with a host that is one step behind."""

    class Overlapped(OverlappedEngine):
        def __init__(self, **shape):
            inner = oracle_engine(**shape)
            super().__init__(scheduler=inner.scheduler, runner=Device(inner.runner))

        def step(self):
            done = super().step()
            self.scheduler.kv.check(self.scheduler.running)
            return done

    return Overlapped


@pytest.mark.parametrize("admission", ["safe", "optimistic"])
@settings(max_examples=500, deadline=None)
@given(workload=workloads())
def test_answers_are_those_of_the_synchronous_loop(overlapped, answers_alone, admission, workload):
    requests, shape = workload
    engine = overlapped(**shape, admission=admission)
    assert by_request(engine.generate(iter(requests))) == {r.id: answers_alone(r) for r in requests}
    assert engine.scheduler.kv.num_held == 0, "every block is free or cached when nothing runs"
    assert admission == "optimistic" or engine.stats.num_preemptions == 0
    assert by_request(engine.generate(reversed(requests))) == {r.id: answers_alone(r) for r in requests}, "over what the first pass left"


def test_plain_rows_run_ahead_and_each_ends_with_a_token_in_vain_at_most(overlapped):
    engine = overlapped(num_blocks=200, block_size=4)
    sampling = [SamplingParams(max_tokens=num) for num in (2, 40)]
    requests = [Request(id=i, prompt_token_ids=[1 + i % 4] * (9 + i), sampling=sampling[i % 2]) for i in range(20)]
    answers = list(engine.generate(requests))
    assert engine.runner.num_ahead >= engine.stats.num_steps * 0.9
    stats = engine.stats
    needed = stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_generated_tokens - len(requests)
    assert {c.finish_reason for c in answers} == {"stop", "length"}
    assert needed < stats.num_step_tokens <= needed + sum(c.finish_reason == "stop" for c in answers)


def test_an_answer_of_known_length_computes_nothing_in_vain(overlapped):
    engine = overlapped(num_blocks=200, block_size=4)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    assert len(list(engine.generate([Request(id=i, prompt_token_ids=[1 + i] * 5, sampling=sampling) for i in range(6)]))) == 6
    assert engine.stats.num_step_tokens == 6 * (5 + 12 - 1)


def test_what_is_aborted_on_its_way_is_dropped(overlapped, oracle_engine):
    engine = overlapped(num_blocks=60, block_size=4)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(id=i, prompt_token_ids=[1 + i] * 7, sampling=sampling) for i in range(4)]
    for request in requests:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.abort_all([0, 1, 2]) == 3
    again = [Request(id=request.id, prompt_token_ids=[6, *request.prompt_token_ids], sampling=sampling) for request in requests[:3]]
    found = by_request(engine.generate(again))
    assert found == by_request(oracle_engine(num_blocks=60, block_size=4).generate([*again, requests[3]]))
    assert engine.scheduler.kv.num_held == 0


@pytest.mark.parametrize(
    ("special", "num_ahead"),
    [({}, 7), ({"n": 2}, 6), ({"prompt_logprobs": 0}, 6), ({"temperature": 0.0, "num_beams": 2}, 0), ({"presence_penalty": 1.0}, 0)],
)
def test_where_the_next_token_hangs_on_the_last_it_is_waited_for(overlapped, oracle_engine, special, num_ahead):
    """Of 8 tokens the first comes from the prompt; samples fork, and a prompt's scores are told, once it is known."""
    engine = overlapped(num_blocks=200, block_size=4)
    request = Request(id=0, prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=8, **{"ignore_eos": True} | special))
    assert by_request(engine.generate([request])) == by_request(oracle_engine(num_blocks=200, block_size=4).generate([request]))
    assert engine.runner.num_ahead == num_ahead


@pytest.mark.parametrize("num_blocks", [400, 20])
def test_a_real_model_answers_the_same(tiny_model, num_blocks):
    """Rows with all kinds of settings, on a pool that is ample and on one that is scarce."""

    def build() -> Engine:
        return Engine.from_config(
            model=ModelConfig(path=tiny_model, dtype="float32"),
            engine=EngineConfig(device="cpu", batch_invariant=True, max_num_seqs=16, threads=1),
            kv_cache=KVCacheConfig(num_blocks=num_blocks),
        )

    requests = [replace(r, sampling=replace(r.sampling, **PLAIN)) if r.id % 3 else r for r in mixed(24)]
    parts = build()
    engine = OverlappedEngine(scheduler=parts.scheduler, runner=parts.runner, tokenizer=parts.tokenizer)
    launch, num_unknown = engine.runner.launch, []

    def counted(plan):
        num_unknown.append(sum(chunk.start + chunk.num_tokens > len(chunk.seq.tokens) for chunk in plan.chunks))
        return launch(plan)

    engine.runner.launch = counted
    assert numbers(answers(engine, requests)) == numbers(answers(build(), requests))
    plain = [request for request in requests if request.id % 3 and request.grammar is None]
    num_unknown.clear()
    assert numbers(answers(engine, plain)) == numbers(answers(build(), plain))
    assert sum(count > 0 for count in num_unknown) > len(num_unknown) / 2

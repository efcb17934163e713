"""The main test of the host side: whatever runs beside it, a request's answer is the one it gets alone (I4)."""

import pytest
from hypothesis import given, settings, strategies as st

from engine.sampling_params import SamplingParams
from engine.stats import Stats
from engine.types import Request

SETTINGS = settings(max_examples=400, deadline=None)


@st.composite
def rows(draw, stems, *, max_num_seqs):
    """A prompt with settings: so many samples or beams, or only scores."""
    prompt = [*draw(st.sampled_from(stems)), 1, *draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))]
    num_beams = min(draw(st.sampled_from([1, 1, 2, 3])), max_num_seqs)
    scored = draw(st.sampled_from([None, None, 0]))
    if num_beams == 1:
        max_tokens = draw(st.integers(1 if scored is None else 0, 12))
        settings = {"n": draw(st.integers(1, 3)) if max_tokens else 1}
    else:
        max_tokens = draw(st.integers(1, 12))
        settings = {
            "n": draw(st.integers(1, num_beams)),
            "temperature": 0.0,
            "num_beams": num_beams,
            "length_penalty": draw(st.sampled_from([0.0, 1.0, 2.0, -1.0])),
            "early_stopping": draw(st.sampled_from([True, False, "never"])),
        }
    return prompt, SamplingParams(max_tokens=max_tokens, prompt_logprobs=scored, **settings)


@st.composite
def workloads(draw):
    """Prompts over few tokens that share prefixes, on pools that are scarce, with small blocks and budgets."""
    block_size = draw(st.integers(1, 5))
    max_num_seqs = draw(st.integers(1, 8))
    stems = draw(st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=14), min_size=1, max_size=3))
    drawn = draw(st.lists(rows(stems, max_num_seqs=max_num_seqs), min_size=1, max_size=14))
    requests = [Request(id=i, prompt_token_ids=prompt, sampling=sampling) for i, (prompt, sampling) in enumerate(drawn)]
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    return requests, {
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + draw(st.integers(0, 12)),
        "max_num_seqs": max_num_seqs,
        "budget": max_num_seqs + draw(st.integers(0, 20)),
        "prefix_cache": draw(st.booleans()),
        "quantises": draw(st.booleans()),
    }


def by_request(completions) -> dict:
    """Request id -> for each sample its tokens and its prompt's log probabilities."""
    answers: dict = {}
    for completion in completions:
        samples = answers.setdefault(completion.request_id, [])
        assert completion.sample_index == len(samples), "samples come in order"
        samples.append((completion.token_ids, completion.prompt_logprobs))
    return answers


@pytest.mark.parametrize("admission", ["safe", "optimistic"])
@settings(max_examples=1000, deadline=None)
@given(workloads())
def test_answers_do_not_depend_on_what_else_runs(oracle_engine, answers_alone, admission, workload):
    """Optimistic admission never hangs, or the engine would raise; safe admission never preempts."""
    requests, shape = workload
    engine = oracle_engine(**shape, admission=admission)
    assert by_request(engine.generate(iter(requests))) == {r.id: answers_alone(r) for r in requests}
    assert engine.scheduler.kv.num_held == 0, "every block is free or cached when nothing runs"
    stats = engine.stats
    assert admission == "optimistic" or stats.num_preemptions == 0
    assert stats.num_prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert engine.runner.num_computed == stats.num_step_tokens
    if not any(r.sampling.uses_beams for r in requests):  # a search also computes beams that come to nothing
        computed = stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_recomputed_tokens + stats.num_generated_tokens
        # The token that ends an answer is drawn and never computed.
        assert stats.num_step_tokens == computed - sum(r.sampling.n for r in requests)


@SETTINGS
@given(workloads(), st.integers(0, 5))
def test_second_pass_over_a_warm_cache_gives_the_same(oracle_engine, answers_alone, workload, rotate):
    requests, shape = workload
    engine = oracle_engine(**shape)
    list(engine.generate(requests))
    again = requests[rotate:] + requests[:rotate]
    assert by_request(engine.generate(again)) == {r.id: answers_alone(r) for r in requests}


@SETTINGS
@given(workloads(), st.integers(0, 5), st.sampled_from([0, 0, 1, 2, 3]))
def test_answers_do_not_depend_on_what_earlier_engines_saved(oracle_engine, answers_alone, shelf_in_memory, workload, rotate, gone):
    requests, shape = workload
    shelf = shelf_in_memory(gone=gone)
    expected = {r.id: answers_alone(r) for r in requests}
    for _ in range(3):
        engine = oracle_engine(**shape, saved=shelf)
        assert by_request(engine.generate(requests)) == expected
        assert engine.scheduler.kv.num_held == 0
        assert engine.stats.num_blocks_loaded == 0 or shape["prefix_cache"]
        engine.close()
        requests = requests[rotate:] + requests[:rotate]


def test_a_second_engine_computes_nothing_that_the_first_one_shared(oracle_engine, shelf_in_memory):
    system = [1 + i % 5 for i in range(43)]
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    shelf = shelf_in_memory()
    for day in range(3):
        engine = oracle_engine(num_blocks=100, block_size=4, saved=shelf)
        rows = [Request(id=i, prompt_token_ids=[*system, 1 + day, 1 + i, 6], sampling=sampling) for i in range(3)]
        cached = {completion.request_id: completion.num_cached_tokens for completion in engine.generate(rows)}
        engine.close()
        assert min(cached.values()) == (0 if day == 0 else 40), "43 tokens have ten whole blocks of 4"
        assert engine.stats.num_blocks_loaded == (0 if day == 0 else 10), "once, however many rows have them"
    assert len(shelf.contents) >= 10


@pytest.mark.parametrize("settings", [{}, {"n": 3}, {"temperature": 0.0, "num_beams": 3, "n": 3}])
def test_what_one_row_had_alone_is_not_saved(oracle_engine, shelf_in_memory, settings):
    shelf = shelf_in_memory()
    engine = oracle_engine(num_blocks=100, block_size=4, saved=shelf)
    sampling = SamplingParams(max_tokens=12, ignore_eos=not settings.get("num_beams"), **settings)
    list(engine.generate([Request(id=0, prompt_token_ids=[1] * 21, sampling=sampling)]))
    engine.close()
    assert shelf.contents == {}


def test_a_row_that_found_its_own_blocks_after_a_preemption_shares_nothing(oracle_engine, shelf_in_memory):
    shelf = shelf_in_memory()
    engine = oracle_engine(num_blocks=14, block_size=4, saved=shelf)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    list(engine.generate([Request(id=i, prompt_token_ids=[1 + i] * 9, sampling=sampling) for i in range(4)]))
    engine.close()
    assert engine.stats.num_preemptions > 0
    assert shelf.contents == {}


class RecountedStats(Stats):
    """Counts blocks and slots anew from the sequences themselves whenever a step is recorded."""

    def record_step(self, **numbers):
        super().record_step(**numbers)
        running, kv = self.scheduler.running, self.scheduler.kv
        held = {block for seq in running for block in seq.blocks}
        slots = {(seq.blocks[p // kv.block_size], p % kv.block_size) for seq in running for p in range(seq.num_computed)}
        idle = {node.block for node in kv.tree.nodes()} - held
        seen = self.snapshot()
        assert (seen["kv_blocks_used"], seen["kv_blocks_cached"]) == (len(held), len(idle))
        assert seen["kv_blocks_free"] == kv.num_blocks - len(held | idle)
        assert seen["kv_utilisation"] == len(slots) / (len(held) * kv.block_size)
        assert seen["kv_utilisation"] + seen["kv_fragmentation"] == pytest.approx(1.0)
        self.recounted.append((len(held), seen["kv_utilisation"]))


@SETTINGS
@given(workloads())
def test_stats_say_what_the_pool_holds(oracle_engine, workload):
    requests, shape = workload
    engine = oracle_engine(**shape)
    engine.scheduler.stats = stats = RecountedStats(num_blocks=shape["num_blocks"])
    stats.scheduler, stats.recounted = engine.scheduler, []
    list(engine.generate(requests))
    seen, steps = stats.snapshot(), stats.recounted
    assert seen["steps"] == len(steps)
    if steps:
        assert seen["kv_blocks_peak"] == max(num_held for num_held, _ in steps)
        assert seen["kv_utilisation_mean"] == pytest.approx(sum(share for _, share in steps) / len(steps))
    drawing = [r for r in requests if r.sampling.max_tokens]
    assert seen["time_to_first_token_s"]["count"] == len(drawing), "once a request, whatever its samples and preemptions"


def test_held_slots_are_nearly_full_where_prompts_are_short(oracle_engine):
    """Blocks of 16, prompts of 60 to 130 tokens, answers of 50 to 125: what is lost is the open end of the last block."""
    engine = oracle_engine(num_blocks=4000, block_size=16, max_num_seqs=64, budget=256, vocab_size=1000)
    asked = [
        Request(
            id=i, prompt_token_ids=[1 + i, *[7] * (59 + i * 37 % 71)], sampling=SamplingParams(max_tokens=50 + i * 53 % 76, ignore_eos=True)
        )
        for i in range(128)
    ]
    list(engine.generate(asked))
    assert 0.90 < engine.stats.snapshot()["kv_utilisation_mean"] < 1.0


def test_first_token_counts_the_wait_in_the_queue(oracle_engine, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    engine = oracle_engine(num_blocks=100, block_size=4, max_num_seqs=1, vocab_size=1000)
    for i in range(3):
        request = Request(id=i, prompt_token_ids=[1 + i], sampling=SamplingParams(max_tokens=2, ignore_eos=True))
        assert engine.submit(request) is None
    while engine.scheduler.has_work:
        clock[0] += 1.0
        engine.step()
    waits = engine.stats.snapshot()["time_to_first_token_s"]
    assert waits["count"] == 3 and waits["mean"] == 3.0, "1, 3 and 5 steps of a second"
    assert waits["p50"] == pytest.approx(3.0, rel=0.01) and waits["p99"] == pytest.approx(5.0, rel=0.01)


@pytest.mark.parametrize("n", [1, 4])
def test_scarce_pool_preempts_and_loses_nothing(oracle_engine, answers_alone, n):
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, n=n)
    requests = [Request(id=i, prompt_token_ids=[1 + i % 6] * 9, sampling=sampling) for i in range(8)]
    engine = oracle_engine(num_blocks=14, block_size=4)
    answers = by_request(engine.generate(requests))
    assert engine.stats.num_preemptions > 0
    assert all(len(token_ids) == 40 for samples in answers.values() for token_ids, _ in samples)
    ample = oracle_engine(num_blocks=400, block_size=4)
    assert by_request(ample.generate(requests)) == answers
    assert ample.stats.num_preemptions == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_share_the_prompt_and_copy_only_its_open_block(oracle_engine, prefix_cache):
    engine = oracle_engine(num_blocks=100, block_size=4, vocab_size=1000, prefix_cache=prefix_cache)
    engine.submit(Request(id=0, prompt_token_ids=list(range(1, 19)), sampling=SamplingParams(max_tokens=3, ignore_eos=True, n=5)))
    engine.step()
    assert engine.scheduler.kv.num_held == 5, "four full blocks and the open one, once for all samples"
    engine.step()
    assert engine.scheduler.kv.num_held == 4 + 5, "each writer but the last took a copy of the open block"
    assert engine.stats.num_step_tokens == 18 + 5
    assert [c.sample_index for c in engine.step()] == [0, 1, 2, 3, 4]
    assert engine.scheduler.kv.num_held == 0


def test_beams_share_the_prompt_and_copy_only_the_open_block(oracle_engine, answers_alone):
    sampling = SamplingParams(max_tokens=4, temperature=0.0, num_beams=5, n=5)
    request = Request(id=0, prompt_token_ids=list(range(1, 19)), sampling=sampling)
    engine = oracle_engine(num_blocks=100, block_size=4, vocab_size=50)
    engine.submit(request)
    engine.step()
    assert engine.scheduler.kv.num_held == 5, "four full blocks and the open one, once for all beams"
    engine.step()
    assert engine.scheduler.kv.num_held <= 4 + 5, "each beam has no more than an open block of its own"
    assert engine.stats.num_step_tokens == 18 + 5
    assert by_request([*engine.step(), *engine.step()])[0] == answers_alone(request, vocab_size=50)
    assert engine.scheduler.kv.num_held == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_that_do_not_fit_together_take_turns(oracle_engine, answers_alone, prefix_cache):
    """Two searches of four beams on a pool that holds hardly more than one sequence."""
    sampling = SamplingParams(max_tokens=16, temperature=0.0, num_beams=4, n=4, length_penalty=2.0, early_stopping="never")
    requests = [Request(id=i, prompt_token_ids=[1 + i] * 9, sampling=sampling) for i in range(2)]
    engine = oracle_engine(num_blocks=8, block_size=4, prefix_cache=prefix_cache)
    assert by_request(engine.generate(requests)) == {r.id: answers_alone(r) for r in requests}
    assert engine.stats.num_preemptions > 0
    assert engine.scheduler.kv.num_held == 0

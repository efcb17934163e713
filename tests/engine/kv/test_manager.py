"""Which block is given out: parts of blocks are copied, what the queue needs is kept, fresh memory is touched last."""

import pytest

from engine.sampling_params import SamplingParams
from engine.types import Request


def row(id, prompt, *, max_tokens=2) -> Request:
    return Request(id=id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def test_the_shared_part_of_a_block_is_copied_and_not_computed(oracle_engine):
    """22 shared tokens: one block of 16 by reference, 6 tokens of the next by copy; the first row computes them for all."""
    shared = list(range(1, 23))
    engine = oracle_engine(num_blocks=100, block_size=16, vocab_size=1000)
    done = list(engine.generate(row(i, [*shared, *([100 + i] * 20)]) for i in range(8)))
    assert sorted(c.num_cached_tokens for c in done) == [0] + [22] * 7
    assert engine.stats.num_prompt_tokens - engine.stats.num_cached_tokens == 22 + 8 * 20


@pytest.mark.parametrize(("copies_parts", "num_cached"), [(True, 7), (False, 0)])
def test_a_format_that_cannot_be_written_slot_by_slot_copies_nothing(oracle_engine, copies_parts, num_cached):
    engine = oracle_engine(num_blocks=100, block_size=16, copies_parts=copies_parts)
    next(engine.generate([row(0, list(range(1, 40)))]))
    (done,) = engine.generate([row(1, [*range(1, 8), 50, 51])])
    assert done.num_cached_tokens == num_cached


def test_what_nobody_waits_for_goes_before_fresh_memory(oracle_engine):
    engine = oracle_engine(num_blocks=100, block_size=4, vocab_size=1000)
    for i in range(30):
        next(engine.generate([row(i, [i + 1] * 15)]))
    assert sum(slot is not None for slot in engine.runner.slots) <= 4 * 4, "the blocks of one row serve all"


def test_what_the_queue_needs_is_kept(oracle_engine):
    """Two rows with the prefix 1 1 1 ... frame ten others in a queue of one place: the last one finds the prefix cached."""
    prompts = [[1] * 15, *([i + 2] * 15 for i in range(10)), [*[1] * 12, 2, 2, 2]]
    engine = oracle_engine(num_blocks=100, block_size=4, vocab_size=1000, max_num_seqs=1)
    engine.scheduler.waiting.candidates = lambda **_: list(engine.scheduler.waiting)  # in the order of arrival
    for i, prompt in enumerate(prompts):
        engine.submit(row(i, prompt))
    done = {}
    while engine.scheduler.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
    assert done[11].num_cached_tokens == 12
    assert sum(slot is not None for slot in engine.runner.slots) <= (4 + 3) * 4


def test_a_scarce_pool_gives_up_even_what_the_queue_needs(oracle_engine):
    prompts = [[1] * 15, [2] * 30, [*[1] * 12, 2, 2, 2]]
    engine = oracle_engine(num_blocks=8, block_size=4, vocab_size=1000, max_num_seqs=1)
    engine.scheduler.waiting.candidates = lambda **_: list(engine.scheduler.waiting)
    for i, prompt in enumerate(prompts):
        engine.submit(row(i, prompt))
    done = {}
    while engine.scheduler.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
    assert len(done[1].token_ids) == 2 and done[2].num_cached_tokens == 0


def test_a_saved_block_does_not_fill_the_one_that_a_copy_is_made_from(oracle_engine, shelf_in_memory):
    """The first row starts from a copy of an idle block, which is the next to be given out, to a row that has saved blocks."""
    shelf = shelf_in_memory()
    earlier = oracle_engine(num_blocks=20, block_size=4, saved=shelf)
    list(earlier.generate([row(0, [7] * 9), row(1, [7] * 9)]))
    earlier.close()
    engine = oracle_engine(num_blocks=20, block_size=4, saved=shelf)
    engine.scheduler.waiting.candidates = lambda **_: list(engine.scheduler.waiting)  # in the order of arrival
    list(engine.generate([row(0, [1, 2, 3, 4, 5], max_tokens=1)]))
    for request in (row(1, [1, 2, 3, 9], max_tokens=1), row(2, [7] * 9, max_tokens=1)):
        engine.submit(request)
    done = {completion.request_id: completion for completion in engine.step()}
    assert (done[1].num_cached_tokens, done[2].num_cached_tokens) == (3, 0), "the device of this test verifies every read"

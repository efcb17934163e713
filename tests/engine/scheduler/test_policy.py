"""The waiting queue against its definition on plain lists, and its promise that nobody waits for ever."""

from __future__ import annotations

from array import array
from itertools import groupby

from hypothesis import given, strategies as st

from engine.sampling_params import SamplingParams
from engine.scheduler.policy import PrefixFirst
from engine.sequence import Sequence
from engine.types import Request

BLOCK = 2
TOKENS = st.integers(1, 3)
ROWS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=9), st.integers(1, 4)), min_size=1, max_size=20)


def sequence(id, prompt, max_tokens) -> Sequence:
    return Sequence(
        Request(id=id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)), max_len=len(prompt) + max_tokens
    )


def num_steps(seq: Sequence) -> float:
    return seq.max_len - seq.num_prompt + seq.num_prompt / 128


def depth_first(seqs: list[Sequence], depth: int = 0) -> list[Sequence]:
    """The definition: branches by the next block, the one with the heaviest sequence first; equal prompts by their weight."""

    def weight(seq):
        return num_steps(seq) - seq.request.id / 32

    if len(seqs) == 1 or all(seq.tokens == seqs[0].tokens for seq in seqs):
        return sorted(seqs, key=weight, reverse=True)

    def next_block(seq):
        return seq.tokens[depth : depth + BLOCK].tolist()

    branches = [list(run) for _, run in groupby(sorted(seqs, key=next_block), key=next_block)]
    branches.sort(key=lambda branch: max(map(weight, branch)), reverse=True)
    return [seq for branch in branches for seq in depth_first(branch, depth + BLOCK)]


@given(ROWS)
def test_the_order_is_depth_first_with_the_heaviest_branch_in_front(rows):
    seqs = [sequence(i, *row) for i, row in enumerate(rows)]
    queue = PrefixFirst(block_size=BLOCK)
    for seq in seqs:
        queue.add(seq)
    ordered = depth_first(seqs)
    first = min(seqs, key=num_steps)
    assert queue.candidates(limit=len(seqs)) == [first, *(seq for seq in ordered if seq is not first)]
    queue.remove(first)
    for seq in (again := [sequence(len(rows) + i, *row) for i, row in enumerate(rows)]):
        queue.add(seq)
    left = depth_first([*(seq for seq in seqs if seq is not first), *again])
    assert queue.candidates(limit=len(left)) == left, "only the first of all goes out of turn"


@given(ROWS, st.lists(st.integers(0, 19)), st.lists(TOKENS, max_size=6))
def test_it_knows_how_those_that_wait_begin(rows, gone, prefix):
    seqs = [sequence(i, *row) for i, row in enumerate(rows)]
    queue = PrefixFirst(block_size=BLOCK)
    for seq in seqs:
        (queue.resume if seq.request.id % 3 == 0 else queue.add)(seq)
    queue.candidates(limit=4)
    for index in {index for index in gone if index < len(seqs)}:
        queue.remove(seqs[index])
    left = [seq for i, seq in enumerate(seqs) if i not in gone]
    assert sorted(queue, key=id) == sorted(left, key=id)
    assert len(queue) == len(left)
    expected = any(seq.tokens.tolist()[: len(prefix)] == prefix for seq in left)
    assert queue.begins_with(array("i", prefix).tobytes()) == expected


def test_resumed_sequences_go_first_the_oldest_in_front():
    queue = PrefixFirst(block_size=BLOCK)
    seqs = [sequence(i, [i + 1], 1) for i in range(4)]
    queue.add(seqs[3])
    for seq in (seqs[2], seqs[1], seqs[0]):  # the youngest is preempted first
        queue.resume(seq)
    assert queue.candidates(limit=9) == seqs


def test_nobody_waits_for_ever():
    """Two longer ones arrive for each that is taken; the shortest of all goes when 32 came for each step that it is shorter."""
    queue = PrefixFirst(block_size=BLOCK)
    queue.add(sequence(-1, [9, 9], 1))
    queue.remove(queue.candidates(limit=1)[0])  # the very first goes out of turn
    shortest = sequence(0, [9, 9], 1)
    queue.add(shortest)
    for i in range(1, 1000):
        queue.add(sequence(2 * i, [1 + i % 7, 1], 11))
        queue.add(sequence(2 * i + 1, [1 + i % 5, 2], 11))
        taken = queue.candidates(limit=1)[0]
        queue.remove(taken)
        if taken is shortest:
            assert i > 10 * 32 / 2
            return
    raise AssertionError("it still waits")

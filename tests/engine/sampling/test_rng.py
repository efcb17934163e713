"""The uniform numbers of draws: known answers from another BLAKE2b, flat, and never shared by accident."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.sampling.rng import uniform
from engine.sampling_params import SamplingParams
from engine.types import Request


def number(id="r", seed=None, *, engine_seed=0, sample_index=0, position=0):
    request = Request(id=id, prompt_token_ids=[1], sampling=SamplingParams(seed=seed))
    return uniform(request, engine_seed=engine_seed, sample_index=sample_index, position=position)


# From coreutils: printf '["seed", 7, 0, 0]' | b2sum -l 64
@pytest.mark.parametrize(
    ("arguments", "digest"),
    [
        ({"seed": 7}, "0cc63bd18e5d6692"),
        ({"seed": 7, "sample_index": 1}, "d0fd6d5d0aa276a5"),
        ({"id": "data/a.jsonl:3", "position": 12}, "83f9092d07c5ecb1"),
        ({"id": 3, "position": 12}, "4b2fd98838e6f428"),
        ({"id": "café"}, "f452b1fe9e1dd85c"),
    ],
)
def test_known_answers(arguments, digest):
    assert number(**arguments) == (int.from_bytes(bytes.fromhex(digest), "little") >> 11) / 2**53


def test_a_seed_alone_decides():
    assert number("a", 5, engine_seed=1, position=3) == number("b", 5, engine_seed=2, position=3)


def test_every_part_of_the_key_and_the_counter_counts():
    keys = itertools.product(("1", 1, "11"), (0, 1, -1), range(3), range(4))
    numbers = [number(id, engine_seed=seed, sample_index=s, position=p) for id, seed, s, p in keys]
    numbers += [number(seed=seed, sample_index=s, position=p) for seed, s, p in itertools.product((0, 1, 10**30), range(3), range(4))]
    assert len(set(numbers)) == len(numbers)


def test_flat_and_without_memory():
    draws = np.array([[number(f"row {i}", position=p) for p in range(4)] for i in range(5000)])
    assert draws.min() >= 0.0 and draws.max() < 1.0
    counts = np.histogram(draws, bins=50, range=(0, 1))[0]
    assert ((counts - 400.0) ** 2 / 400.0).sum() < 94.6  # chi-square, 49 degrees of freedom, p = 1e-4
    correlation = np.corrcoef(draws.T) - np.eye(4)
    assert np.abs(correlation).max() < 4 / np.sqrt(5000)

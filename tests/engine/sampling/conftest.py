"""Rows to draw for: a sequence that has generated so many tokens, with the given settings."""

from __future__ import annotations

import pytest

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.types import Draw, Request


@pytest.fixture(scope="session")
def row():
    def make(id: str | int = 0, *, position: int = 0, sample_index: int = 0, **params) -> Sequence:
        seq = Sequence(Request(id=id, prompt_token_ids=[1, 2], sampling=SamplingParams(**params)), max_len=100, sample_index=sample_index)
        for _ in range(position):
            seq.append(Draw(3, -1.0))
        return seq

    return make

"""A fake device for the host side of the engine: slots hold the hash of the prefix that they stand for."""

from __future__ import annotations

import pytest

from engine.kv.manager import BlockManager
from engine.loop import Engine
from engine.scheduler.scheduler import Scheduler
from engine.types import Draw

EOS = 0


def prefix_hashes(tokens) -> list[int]:
    """Entry i stands for tokens[: i + 1]: what a real device's keys and values at position i depend on."""
    hashes, value = [], 17
    for token in tokens:
        value = hash((value, token))
        hashes.append(value)
    return hashes


class OracleRunner:
    """Verifies every read: token p may only be computed where the slots of 0..p hold the prefixes of this sequence."""

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.num_computed = 0

    def run(self, plan) -> list[Draw]:
        hashes = {chunk.seq: prefix_hashes(chunk.seq.tokens) for chunk in plan.chunks}
        for chunk in plan.chunks:  # a layer writes the whole step before it reads
            assert chunk.start == chunk.seq.num_computed and chunk.num_tokens >= 1
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.slots[self._slot(chunk.seq, position)] = hashes[chunk.seq][position]
            self.num_computed += chunk.num_tokens
        for chunk in plan.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                assert self.slots[self._slot(chunk.seq, position)] == hashes[chunk.seq][position], "read a foreign slot"
        return [self.draw(hashes[chunk.seq][-1]) for chunk in plan.sampling]

    def draw(self, prefix_hash: int) -> Draw:
        return Draw(prefix_hash % self.vocab_size, -float(prefix_hash % 97))

    def _slot(self, seq, position: int) -> int:
        return seq.blocks[position // self.block_size] * self.block_size + position % self.block_size


class OracleEngine(Engine):
    """The real loop, scheduler and block manager over the fake device; every step ends with a check of the pool."""

    def __init__(self, *, num_blocks, block_size, vocab_size=7, budget=32, max_num_seqs=8, max_model_len=10_000, prefix_cache=True) -> None:
        kv = BlockManager(num_blocks=num_blocks, block_size=block_size, prefix_cache=prefix_cache)
        scheduler = Scheduler(
            kv=kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids={EOS},
        )
        super().__init__(scheduler=scheduler, runner=OracleRunner(num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size))

    def step(self):
        done = super().step()
        self.scheduler.kv.check(self.scheduler.running)
        return done


@pytest.fixture(scope="session")
def oracle_engine() -> type[OracleEngine]:
    return OracleEngine


@pytest.fixture(scope="session")
def answer_alone():
    """What a request must get whatever else runs: the draws of its own prefix hashes, nothing more."""

    def answer(request, *, vocab_size: int = 7, max_len: int = 10_000) -> tuple[int, ...]:
        device = OracleRunner(num_blocks=0, block_size=1, vocab_size=vocab_size)
        tokens = list(request.prompt_token_ids)
        for _ in range(min(request.sampling.max_tokens, max_len - len(tokens))):
            tokens.append(device.draw(prefix_hashes(tokens)[-1]).token_id)
            if tokens[-1] == EOS:
                break
        return tuple(tokens[len(request.prompt_token_ids) :])

    return answer

"""A fake device for the host side of the engine: slots hold the hash of the prefix that they stand for."""

from __future__ import annotations

import pytest

from engine.kv.manager import BlockManager
from engine.loop import Engine
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
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
        for source, target in plan.copies:
            self.slots[target * self.block_size : (target + 1) * self.block_size] = self.slots[
                source * self.block_size : (source + 1) * self.block_size
            ]
        hashes = {chunk.seq: prefix_hashes(chunk.seq.tokens) for chunk in plan.chunks}
        for chunk in plan.chunks:  # a layer writes the whole step before it reads
            assert chunk.start == chunk.seq.num_computed and chunk.num_tokens >= 1
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.slots[self._slot(chunk.seq, position)] = hashes[chunk.seq][position]
            self.num_computed += chunk.num_tokens
        for chunk in plan.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                assert self.slots[self._slot(chunk.seq, position)] == hashes[chunk.seq][position], "read a foreign slot"
        results = []
        for chunk in plan.chunks:
            results += [Draw(chunk.seq.tokens[p], self.score(hashes[chunk.seq][p])) for p in chunk.scores]
            if chunk.samples:
                results += [self.draw(chunk.seq, hashes[chunk.seq][-1], i) for i in range(chunk.seq.num_draws)]
        return results

    @staticmethod
    def score(prefix_hash: int) -> float:
        return -float(prefix_hash % 89)

    def draw(self, seq, prefix_hash: int, index: int) -> Draw:
        """Like a seeded draw: it depends on the prefix and on which sample of the request it is for."""
        noise = hash((prefix_hash, seq.sample_index + index))
        return Draw(noise % self.vocab_size, -float(noise % 97))

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
            vocab_size=1000,
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
def answers_alone():
    """What a request must get whatever else runs: what its own prefix hashes give, nothing more."""

    def answers(request, *, vocab_size: int = 7) -> list[tuple[tuple[int, ...], tuple[float, ...] | None]]:
        device = OracleRunner(num_blocks=0, block_size=1, vocab_size=vocab_size)
        scores = tuple(device.score(value) for value in prefix_hashes(request.prompt_token_ids)[1:])
        samples = [Sequence(request, max_len=10_000, sample_index=i) for i in range(request.sampling.n)]
        return [(_answer(device, seq), scores if seq.scores_prompt else None) for seq in samples]

    return answers


def _answer(device: OracleRunner, seq: Sequence) -> tuple[int, ...]:
    while seq.num_generated < seq.request.sampling.max_tokens:
        seq.append(device.draw(seq, prefix_hashes(seq.tokens)[-1], 0))
        if seq.tokens[-1] == EOS:
            break
    return tuple(seq.tokens[seq.num_prompt :])

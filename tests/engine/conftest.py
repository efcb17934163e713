"""A fake device for the host side of the engine: slots hold the hash of the prefix that they stand for."""

from __future__ import annotations

import struct

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

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int, budget: int | None = None) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.budget = budget
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.num_computed = 0

    def run(self, plan) -> list[Draw]:
        assert self.budget is None or plan.num_tokens <= self.budget, "a step is over its budget"
        for block, content in plan.loads:
            self.slots[block * self.block_size : (block + 1) * self.block_size] = struct.unpack(f"{self.block_size}q", content)
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
            if chunk.samples and chunk.seq.beams is not None:
                results += self.distribution(hashes[chunk.seq][-1])[: chunk.seq.num_draws]
            elif chunk.samples:
                results += [self.draw(chunk.seq, hashes[chunk.seq][-1], i) for i in range(chunk.seq.num_draws)]
        return results

    def read_block(self, block: int) -> bytes:
        return struct.pack(f"{self.block_size}q", *self.slots[block * self.block_size : (block + 1) * self.block_size])

    @staticmethod
    def score(prefix_hash: int) -> float:
        return -float(prefix_hash % 89)

    def draw(self, seq, prefix_hash: int, index: int) -> Draw:
        """Like a seeded draw: it depends on the prefix and on which sample of the request it is for."""
        noise = hash((prefix_hash, seq.sample_index + index))
        return Draw(noise % self.vocab_size, -float(noise % 97))

    def distribution(self, prefix_hash: int) -> list[Draw]:
        """Every token as a beam's candidate, the best first, of equal ones the lowest."""
        logprobs = [-float(hash((prefix_hash, token_id, 61)) % 61) / 4 for token_id in range(self.vocab_size)]
        best_first = sorted(range(self.vocab_size), key=lambda token_id: -logprobs[token_id])
        return [Draw(token_id, logprobs[token_id], (), logprobs[token_id]) for token_id in best_first]

    def _slot(self, seq, position: int) -> int:
        return seq.blocks[position // self.block_size] * self.block_size + position % self.block_size


class OracleEngine(Engine):
    """The real loop, scheduler and block manager over the fake device; every step ends with a check of the pool."""

    def __init__(
        self,
        *,
        num_blocks,
        block_size,
        vocab_size=7,
        budget=32,
        max_num_seqs=8,
        max_model_len=10_000,
        prefix_cache=True,
        copies_parts=True,
        admission="optimistic",
        saved=None,
    ) -> None:
        kv = BlockManager(num_blocks=num_blocks, block_size=block_size, prefix_cache=prefix_cache, copies_parts=copies_parts, saved=saved)
        scheduler = Scheduler(
            kv=kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            eos_token_ids={EOS},
            vocab_size=1000,
            admission=admission,
        )
        device = OracleRunner(num_blocks=num_blocks, block_size=block_size, vocab_size=vocab_size, budget=budget)
        super().__init__(scheduler=scheduler, runner=device, saved=saved)

    def step(self):
        done = super().step()
        self.scheduler.kv.check(self.scheduler.running)
        return done


@pytest.fixture(scope="session")
def oracle_engine() -> type[OracleEngine]:
    return OracleEngine


class Shelf:
    """Saved blocks in memory; every ``gone``-th that is asked for is not there."""

    def __init__(self, *, gone: int = 0) -> None:
        self.contents: dict[bytes, bytes] = {}
        self.gone = gone
        self.num_reads = 0

    def read(self, prefix):
        self.num_reads += 1
        return None if self.gone and self.num_reads % self.gone == 0 else self.contents.get(prefix)

    def keep(self, blocks, *, read_block):
        for shared in blocks:
            content = read_block(shared.block)
            assert self.contents.setdefault(shared.prefix(), content) == content, "a block's content depends on its prefix alone"


@pytest.fixture(scope="session")
def shelf_in_memory() -> type[Shelf]:
    return Shelf


@pytest.fixture(scope="session")
def answers_alone():
    """What a request must get whatever else runs: what its own prefix hashes give, nothing more."""

    def answers(request, *, vocab_size: int = 7) -> list[tuple[tuple[int, ...], tuple[float, ...] | None]]:
        device = OracleRunner(num_blocks=0, block_size=1, vocab_size=vocab_size)
        scores = tuple(device.score(value) for value in prefix_hashes(request.prompt_token_ids)[1:])
        if request.sampling.uses_beams:
            found = _beam_search(device, request)
        else:
            found = [_answer(device, Sequence(request, max_len=10_000, sample_index=i)) for i in range(request.sampling.n)]
        return [(token_ids, scores if request.sampling.prompt_logprobs is not None else None) for token_ids in found]

    return answers


def _answer(device: OracleRunner, seq: Sequence) -> tuple[int, ...]:
    while seq.num_generated < seq.request.sampling.max_tokens:
        seq.append(device.draw(seq, prefix_hashes(seq.tokens)[-1], 0))
        if seq.tokens[-1] == EOS:
            break
    return tuple(seq.tokens[seq.num_prompt :])


def _beam_search(device: OracleRunner, request) -> list[tuple[int, ...]]:
    """Beam search over the whole vocabulary at each length, on plain tuples."""
    sampling = request.sampling
    width, penalty = sampling.num_beams, sampling.length_penalty
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, sampling.max_tokens + 1):
        grown = [
            (total + draw.adjusted_logprob, (*answer, draw.token_id))
            for total, answer in beams
            for draw in device.distribution(prefix_hashes([*request.prompt_token_ids, *answer])[-1])
        ]
        grown.sort(key=lambda beam: -beam[0])
        ended = [beam for beam in grown if length == sampling.max_tokens or beam[1][-1] == EOS]
        done += [(total / length**penalty, answer) for total, answer in grown[:width] if (total, answer) in ended]
        done = sorted(done, key=lambda beam: -beam[0])[:width]
        beams = [beam for beam in grown if beam not in ended][:width]
        if len(done) == width and sampling.early_stopping is True:
            break
        hoped_length = sampling.max_tokens if sampling.early_stopping == "never" and penalty > 0 else length
        if len(done) == width and beams and beams[0][0] / hoped_length**penalty <= done[-1][0]:
            break
    return [answer for _, answer in done[: sampling.n]]

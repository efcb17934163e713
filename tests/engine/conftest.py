"""A fake device for the host side of the engine: slots hold the hash of the prefix that they stand for."""

from __future__ import annotations

import struct

import pytest

from engine.kv.manager import BlockManager
from engine.kv.placement import OpenBlocks, Places
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
        assert all(chunk.start == chunk.seq.num_computed for chunk in plan.chunks)
        return self.compute(plan, {chunk.seq: chunk.seq.tokens for chunk in plan.chunks})

    def compute(self, plan, tokens_of) -> list[Draw]:
        assert self.budget is None or plan.num_tokens <= self.budget, "a step is over its budget"
        for block, content in plan.loads:
            self.slots[block * self.block_size : (block + 1) * self.block_size] = struct.unpack(f"{self.block_size}q", content)
        assert all(chunk.num_tokens >= 1 for chunk in plan.chunks)
        hashes = {seq: prefix_hashes(tokens) for seq, tokens in tokens_of.items()}
        self.num_computed += plan.num_tokens
        self.attend(plan, hashes)
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

    def attend(self, plan, hashes) -> None:
        for source, target in plan.copies:
            self.copy_block(source, target)
        for chunk in plan.chunks:  # a layer writes the whole step before it reads
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.slots[self._slot(chunk.seq, position)] = hashes[chunk.seq][position]
        for chunk in plan.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                assert self.slots[self._slot(chunk.seq, position)] == hashes[chunk.seq][position], "read a foreign slot"

    def copy_block(self, source: int, target: int) -> None:
        size = self.block_size
        self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]

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


class QuantisingRunner(OracleRunner):
    """A device whose blocks are quantised when they are full: what is in a place is plain, what is in the pool is not.

    A query must read its own block plain, whole or not, and each earlier block quantised.
    """

    def __init__(self, *, num_blocks: int, block_size: int, vocab_size: int, places: Places, **more) -> None:
        super().__init__(num_blocks=num_blocks + places.num_open + places.num_filling, block_size=block_size, vocab_size=vocab_size, **more)
        self.num_blocks = num_blocks
        self.open_blocks = OpenBlocks(places, num_blocks=num_blocks, block_size=block_size)

    def attend(self, plan, hashes) -> None:
        size = self.block_size
        placement = self.open_blocks.place(plan)
        for source, target in (*placement.copies, *placement.moves):
            assert min(source, target) >= self.num_blocks, "full blocks are shared, never copied"
            self.copy_block(source, target)
        positions = []
        for seq, start, num_tokens, place in placement.pieces:
            assert place is not None and place >= self.num_blocks
            assert start // size == (start + num_tokens - 1) // size, "a piece lies in one block"
            positions += [(seq, position) for position in range(start, start + num_tokens)]
            for position in range(start, start + num_tokens):
                self.slots[place * size + position % size] = hashes[seq][position]
        assert positions == [(c.seq, p) for c in plan.chunks for p in range(c.start, c.start + c.num_tokens)]
        for place, block in placement.full:
            self.slots[block * size : (block + 1) * size] = [-value for value in self.slots[place * size : (place + 1) * size]]
        for seq, start, num_tokens, place in placement.pieces:
            for position in range(start + num_tokens):
                own = position // size == start // size
                found = self.slots[place * size + position % size] if own else self.slots[self._slot(seq, position)]
                assert found == (hashes[seq][position] if own else -hashes[seq][position]), "read a foreign slot"


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
        quantises=False,
    ) -> None:
        copies_parts = copies_parts and not quantises
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
        shape = {"num_blocks": num_blocks, "block_size": block_size}
        if quantises:
            places = Places.for_steps(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **shape)
            device = QuantisingRunner(places=places, vocab_size=vocab_size, budget=budget, **shape)
        else:
            device = OracleRunner(vocab_size=vocab_size, budget=budget, **shape)
        super().__init__(scheduler=scheduler, runner=device, saved=saved)

    def step(self):
        done = super().step()
        self.scheduler.kv.check(self.scheduler.running)
        return done


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """Where the kernels for a GPU are tried: in Triton's interpreter, and with ``pytest -m gpu`` on a GPU."""
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU here")
    return request.param


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

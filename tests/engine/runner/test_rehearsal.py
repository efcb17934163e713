"""Steps before the first real one: what they measure covers every real step."""

from __future__ import annotations

import random
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams
from engine.device import Device
from engine.overlap import OverlappedEngine
from engine.runner.buckets import BucketedForward
from engine.runner.forward import TorchForward
from engine.runner.rehearsal import Rehearsal


class Meter(TorchDispatchMode):
    """Counts the bytes of the tensors that come into being under it and are still held, as a GPU's allocator does."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.held = 0
        self._owners: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}
        known |= {leaf.data_ptr() for leaf in leaves if isinstance(leaf, torch.UntypedStorage)}
        result = func(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, known)
        return result

    def _count(self, tensor, known) -> None:
        storage = tensor.untyped_storage()
        where, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes or (where in known and not self._owners[where]):
            return  # nothing, or a view of what was there before
        self.held += num_bytes if not self._owners[where] else 0
        self.peak = max(self.peak, self.held)
        self._owners[where] += 1
        weakref.finalize(tensor, self._forget, where, num_bytes)

    def _forget(self, where, num_bytes) -> None:
        self._owners[where] -= 1
        self.held -= num_bytes if not self._owners[where] else 0


def peak_bytes(call) -> int:
    with Meter() as meter:
        call()
    return meter.peak


@pytest.fixture
def on_a_gpu(monkeypatch):
    """``on_a_gpu(peak_bytes, free_bytes)``: this machine computes_apart as one with a GPU does, and counts so."""

    def pretend(peak_bytes, free_bytes=2**30):
        monkeypatch.setattr(Device, "computes_apart", True)
        monkeypatch.setattr(Device, "free_bytes", lambda self: free_bytes)
        monkeypatch.setattr(Device, "peak_bytes", lambda self, call: peak_bytes(call))

    return pretend


def build(path: str, *, attention="sdpa", kv_cache=None, **settings) -> Engine:
    return Engine.from_config(
        model=ModelConfig(path=path, dtype="float32"),
        engine=EngineConfig(**{"device": "cpu", "attention": attention, "threads": 1} | settings),
        kv_cache=kv_cache or KVCacheConfig(),
    )


@pytest.mark.parametrize(
    ("budget", "num_seqs", "block_size", "context"), [(64, 8, 16, 1000), (100, 7, 16, 1000), (5, 5, 4, 9), (90, 3, 4, 21)]
)
def test_the_largest_step_is_as_large_as_the_settings_let_one_be(budget, num_seqs, block_size, context):
    rehearsal = Rehearsal(block_size=block_size, max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=context)
    many, one = rehearsal.largest()
    assert (len(many.chunks), len(one.chunks)) == (num_seqs, 1)
    for plan in (many, one):
        assert plan.num_tokens == min(budget, len(plan.chunks) * context)
        assert len(plan.sampling) == len(plan.chunks)
        assert sum(len(chunk.scores) for chunk in plan.chunks) == plan.num_tokens - len(plan.chunks), "all but the first token of each"
        written = [block for chunk in plan.chunks for block in chunk.seq.blocks[: -(-chunk.num_tokens // block_size)]]
        assert len(set(written)) == len(written) and set(written) <= set(range(rehearsal.num_blocks))
        assert all(len(chunk.seq.blocks) == -(-context // block_size) for chunk in plan.chunks)


def test_no_real_step_takes_more_than_was_measured(tiny_model, on_a_gpu):
    pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")
    measured = []
    on_a_gpu(lambda call: measured.append(peak_bytes(call)) or measured[-1])
    engine = build(tiny_model, attention="triton", max_num_seqs=4, max_num_batched_tokens=24)
    assert max(measured) > 2 * 4 * engine.tokenizer.vocab_size * 4, "the logits of four rows, and their log probabilities"

    launch, taken = engine.runner.launch, []

    def measure(plan):
        flights = []
        taken.append(peak_bytes(lambda: flights.append(launch(plan))))
        return flights[0]

    engine.runner.launch = measure
    dice = random.Random(0)
    rows = [
        SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0),
        SamplingParams(max_tokens=6, ignore_eos=True, logprobs=20, top_p=0.5),
        SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=5, presence_penalty=1.0),
        SamplingParams(max_tokens=1, ignore_eos=True, logit_bias={5: 1.0}, top_k=3),
    ]
    requests = [
        Request(id=i, prompt_token_ids=[dice.randrange(200) for _ in range(dice.randrange(1, 60))], sampling=rows[i % 4]) for i in range(12)
    ]
    assert len(list(engine.generate(requests))) == len(requests)
    assert max(taken) <= max(measured)


def test_the_pool_gets_its_share_of_what_a_step_leaves(tiny_model, on_a_gpu):
    on_a_gpu(lambda call: (call(), 300_000)[1], free_bytes=1_000_000)
    block_bytes = 2 * 2 * 16 * 2 * 8 * 4  # layers, key and value, tokens, heads, head size, bytes of a float32
    assert build(tiny_model).stats.num_blocks == 350_000 // block_bytes
    settings = {"kv_cache": KVCacheConfig(memory=600_000)}
    assert build(tiny_model, **settings).stats.num_blocks == 600_000 // block_bytes, "what is asked for is given where it fits"
    with pytest.raises(ValueError, match=r"kv_cache\.memory: .* only 700,000 are free beside the 300,000 that a step takes"):
        build(tiny_model, kv_cache=KVCacheConfig(memory=710_000))


def test_a_step_that_does_not_fit_is_refused_by_its_settings(tiny_model, on_a_gpu):
    def too_large(call):
        raise torch.OutOfMemoryError("out of memory")

    on_a_gpu(too_large)
    with pytest.raises(
        ValueError, match=r"engine\.max_num_batched_tokens: a step of 256 tokens for 64 sequences .*; lower it or engine\.max_num_seqs"
    ):
        build(tiny_model)


def test_a_cpu_computes_apart_nothing(tiny_model, monkeypatch):
    monkeypatch.setattr(Rehearsal, "largest", lambda self: pytest.fail("the first row would come later"))
    build(tiny_model, kv_cache=KVCacheConfig(num_blocks=8))


def test_the_most_that_the_device_held_is_asked_when_it_is_told(tiny_model, monkeypatch):
    held = [None, 2**20, 2**21]
    monkeypatch.setattr(Device, "held_bytes_peak", lambda self: held.pop(0))
    stats = build(tiny_model, kv_cache=KVCacheConfig(num_blocks=8)).stats
    assert [stats.snapshot()["peak_device_bytes"] for _ in range(3)] == [None, 2**20, 2**21]


def counts(engine: Engine) -> dict:
    numbers = engine.stats.snapshot()
    return {key: numbers[key] for key in numbers if key not in ("warm_up_s", "kv_bytes", "time_split", "time_to_first_token_s")}


def test_a_warm_up_records_every_size_and_leaves_no_trace(tiny_model, on_a_gpu):
    pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")
    settings = {"attention": "triton", "max_num_seqs": 5, "max_num_batched_tokens": 24, "kv_cache": KVCacheConfig(num_blocks=40)}
    parts = build(tiny_model, **settings)
    cold = OverlappedEngine(scheduler=parts.scheduler, runner=parts.runner, tokenizer=parts.tokenizer)
    on_a_gpu(lambda call: (call(), 1000)[1])
    warm = build(tiny_model, **settings)
    assert warm.stats.warm_up_s > 0.0 == cold.stats.warm_up_s
    assert warm.stats.kv_bytes == cold.stats.kv_bytes * 41 // 40, "one block is for rows without a sequence"
    assert warm.stats.seconds == {} and counts(warm) == counts(cold)
    assert warm.scheduler.kv.num_cached == warm.scheduler.kv.num_held == 0
    assert isinstance(warm.runner.forward, BucketedForward)

    warm.runner.forward._graphs = None  # nothing is recorded any more
    rows = [SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True), SamplingParams(max_tokens=6, top_p=0.9, ignore_eos=True)]
    requests = [Request(id=i, prompt_token_ids=[*range(20), *[i] * (3 + i)], sampling=rows[i % 2]) for i in range(7)]
    done = [{c.request_id: c for c in engine.generate(requests)} for engine in (warm, cold)]
    for found, expected in zip(*(map(answers.get, range(7)) for answers in done), strict=True):
        assert (found.token_ids, found.num_cached_tokens) == (expected.token_ids, expected.num_cached_tokens)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert counts(warm) == counts(cold)


def test_a_pool_that_leaves_no_room_for_the_steps_is_refused(tiny_model, on_a_gpu, monkeypatch):
    def too_large(self, batch):
        raise torch.OutOfMemoryError("out of memory")

    on_a_gpu(lambda call: 1000)
    monkeypatch.setattr(TorchForward, "hidden", too_large)
    with pytest.raises(
        ValueError, match=r"kv_cache\.memory: the 30 blocks leave too little .*; give less, or lower engine\.max_num_batched_tokens"
    ):
        build(tiny_model, kv_cache=KVCacheConfig(num_blocks=30))


@pytest.mark.parametrize("num_blocks", [1, 3, 100])
def test_each_size_of_decodes_has_its_step(num_blocks):
    rehearsal = Rehearsal(block_size=4, max_num_seqs=6, max_num_batched_tokens=32, max_model_len=50)
    prompt, *decodes = rehearsal.shapes(num_blocks=num_blocks)
    assert prompt.num_tokens == min(32, num_blocks * 4)
    assert [plan.num_tokens for plan in decodes] == {1: [1], 3: [3, 2, 1], 100: [6, 4, 2, 1]}[num_blocks]
    assert all(chunk.num_tokens == 1 and chunk.samples for plan in decodes for chunk in plan.chunks)
    assert {block for plan in (prompt, *decodes) for chunk in plan.chunks for block in chunk.seq.blocks} <= set(range(num_blocks))

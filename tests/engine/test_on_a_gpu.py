"""The whole engine on an NVIDIA GPU: `pytest -m gpu`. What is tested here without one is tested piece by piece elsewhere."""

from __future__ import annotations

import pytest
import torch

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams
from engine.device import Device
from engine.overlap import OverlappedEngine
from engine.runner.buckets import BucketedForward, bucket_sizes

pytestmark = pytest.mark.gpu

MAX_NUM_SEQS, BUDGET = 5, 64


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no NVIDIA GPU here")
    pytest.importorskip("triton", reason="triton is not installed: pip install 'pagemill[gpu]'")


def build(path: str, *, device="cuda", attention="triton", kv_cache=None) -> Engine:
    return Engine.from_config(
        model=ModelConfig(path=path, dtype="float32"),
        engine=EngineConfig(device=device, attention=attention, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET),
        kv_cache=kv_cache or KVCacheConfig(num_blocks=200),
    )


def requests() -> list[Request]:
    rows = [SamplingParams(max_tokens=n, temperature=t, top_p=0.9, ignore_eos=True) for n, t in ((19, 0.0), (5, 1.0), (12, 0.7))]
    return [Request(id=i, prompt_token_ids=[*range(20), *[i] * (3 + 7 * i)], sampling=rows[i % 3]) for i in range(11)]


def answers(engine: Engine) -> dict:
    return {c.request_id: c.token_ids for c in engine.generate(requests())}


def test_answers_are_those_of_the_reference_on_the_cpu(tiny_model):
    engine = build(tiny_model)
    assert isinstance(engine, OverlappedEngine)
    assert isinstance(engine.runner.forward, BucketedForward)
    assert set(engine.runner.forward._buckets) == set(bucket_sizes(MAX_NUM_SEQS)), "every size is recorded when the engine is ready"
    assert engine.stats.warm_up_s > 0
    assert answers(engine) == answers(build(tiny_model, device="cpu", attention="reference"))


def test_the_most_that_was_held_on_the_device_is_told(tiny_model):
    engine = build(tiny_model)
    assert len(answers(engine)) == len(requests())
    told = engine.stats.snapshot()["peak_device_bytes"]
    assert told >= engine.stats.kv_bytes
    assert told == torch.cuda.max_memory_allocated()


def test_nothing_is_compiled_or_recorded_after_the_warm_up(tiny_model, monkeypatch):
    import triton

    engine = build(tiny_model)
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["fn"].name))
    engine.runner.forward._graphs = None
    assert len(answers(engine)) == len(requests())
    assert compiled == []


def test_a_step_of_decodes_is_launched_without_waiting(tiny_model):
    engine = build(tiny_model)
    for request in requests()[:MAX_NUM_SEQS]:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    ahead = engine.scheduler.schedule_ahead(engine._flight.plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flight = engine.runner.launch(ahead)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(flight.draws()) == len(ahead.sampling)


def test_no_step_takes_more_than_was_measured(tiny_model, monkeypatch):
    measured, peak_bytes = [], Device.peak_bytes
    monkeypatch.setattr(Device, "peak_bytes", lambda self, call: measured.append(peak_bytes(self, call)) or measured[-1])
    engine = build(tiny_model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert len(answers(engine)) == len(requests())
    assert torch.cuda.max_memory_allocated() - before <= max(measured)

"""Processes that share a model answer as one does, and none of them outlives or outwaits the others."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams, WorkerLost
from engine.device import Device

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "max_position_embeddings": 512, "eos_token_id": 256}


def engine_of(path: str, *, num_ranks: int, num_blocks: int = 400, kv_format: str = "auto", **settings) -> Engine:
    return Engine.from_config(
        model=ModelConfig(path=path, dtype="float32"),
        engine=EngineConfig(**{"tensor_parallel": num_ranks, "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings),
        kv_cache=KVCacheConfig(num_blocks=num_blocks, block_size=8, format=kv_format),
    )


@pytest.fixture(
    scope="module", params=["llama-biased", "qwen3", *(pytest.param(name, marks=pytest.mark.full) for name in ("llama", "qwen2"))]
)
def path(request, tiny_model, tmp_path_factory) -> str:
    """A model of the family over single bytes."""
    if request.param == "llama":
        return tiny_model
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    configs = {
        "llama-biased": LlamaConfig(vocab_size=260, attention_bias=True, **heads, **_SIZES),
        "qwen2": Qwen2Config(vocab_size=260, tie_word_embeddings=True, **heads, **_SIZES),
        "qwen3": Qwen3Config(vocab_size=260, head_dim=16, **heads, **_SIZES),
    }
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(configs[request.param])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.3 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copy(Path(tiny_model) / name, folder)
    return str(folder)


def rows(count: int) -> list[Request]:
    """Greedy and seeded rows, one and two samples, in two families that share long beginnings; more than a small pool holds."""
    dice = random.Random(4)
    systems = [[dice.randrange(97, 123) for _ in range(60)] for _ in range(2)]
    found = []
    for i in range(count):
        sampling = {"temperature": dice.choice([0.0, 0.8, 1.2]), "seed": dice.choice([None, 7]), "n": dice.choice([1, 1, 2])}
        sampling |= {"top_p": dice.choice([1.0, 0.9]), "prompt_logprobs": 0 if i % 5 == 4 else None}
        prompt = systems[i % 2] + [dice.randrange(97, 123) for _ in range(dice.randrange(1, 30))]
        sampling |= {"max_tokens": dice.randrange(10, 50), "ignore_eos": True}
        found.append(Request(id=i, prompt_token_ids=prompt, sampling=SamplingParams(**sampling)))
    return found


def answers(engine: Engine, requests) -> dict:
    found: dict = {}
    for completion in engine.generate(requests):
        found[completion.request_id, completion.sample_index] = completion
    return found


def test_two_processes_answer_as_one(path):
    """In a pool so small that rows give way to one another, and with beginnings that are computed once."""
    requests = rows(16)
    alone = engine_of(path, num_ranks=1)
    expected = answers(alone, requests)
    engine = engine_of(path, num_ranks=2, num_blocks=30)
    try:
        found = answers(engine, requests)
    finally:
        engine.close()
    assert engine.stats.num_preemptions > 0 and engine.stats.num_cached_tokens > 0
    assert alone.stats.num_preemptions == 0
    assert {key: answer.token_ids for key, answer in found.items()} == {key: answer.token_ids for key, answer in expected.items()}
    for key, answer in found.items():
        assert answer.finish_reason != "error"
        assert answer.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
        assert answer.prompt_logprobs == pytest.approx(expected[key].prompt_logprobs, abs=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("path", ["qwen3"], indirect=True)
@pytest.mark.parametrize("kv_format", ["int8", "fp8", "fp4"])
def test_blocks_that_are_quantised_are_spread_too(path, kv_format):
    """Each head's numbers are rounded by themselves, so that a rank rounds as one process does."""
    requests = rows(10)
    expected = answers(engine_of(path, num_ranks=1, kv_format=kv_format), requests)
    engine = engine_of(path, num_ranks=2, num_blocks=40, kv_format=kv_format)
    try:
        found = answers(engine, requests)
    finally:
        engine.close()
    assert engine.stats.num_preemptions > 0
    assert {key: answer.token_ids for key, answer in found.items()} == {key: answer.token_ids for key, answer in expected.items()}


@pytest.mark.full
def test_a_row_does_not_see_its_neighbours(tiny_model):
    """Bit for bit, and whichever ranks add up: the budget and the neighbours change, the numbers do not."""
    requests = rows(6)
    engine = engine_of(tiny_model, num_ranks=2, batch_invariant=True)
    try:
        alone: dict = {}
        for request in requests:
            alone |= answers(engine, [request])
        together = answers(engine, requests)
    finally:
        engine.close()
    small = engine_of(tiny_model, num_ranks=2, batch_invariant=True, max_num_batched_tokens=16)
    try:
        chunked = answers(small, requests)
    finally:
        small.close()
    numbers = [{key: (a.token_ids, a.logprobs, a.prompt_logprobs) for key, a in found.items()} for found in (alone, together, chunked)]
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.fixture
def three(embedded_model):
    """``three(num_ranks, dtype, ...)``: answers and statistics of the embedded model, which has three key/value heads."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0)
    requests = [Request(id=i, prompt_token_ids=range(100 + i, 130 + i), sampling=sampling) for i in range(4)]

    def found(num_ranks: int, dtype: str, **settings):
        engine = Engine.from_config(
            model=ModelConfig(path=embedded_model.path, dtype=dtype),
            engine=EngineConfig(tensor_parallel=num_ranks, **settings),
            kv_cache=KVCacheConfig(memory="64MiB"),
        )
        try:
            return answers(engine, requests), engine.stats
        finally:
            engine.close()

    return found


@pytest.mark.full
def test_three_processes_answer_as_one(three):
    """And so do they, to the bit, whatever else is in a step, where that is asked for."""
    (expected, stats), (found, shared_stats) = three(1, "float32", attention="sdpa"), three(3, "float32")
    assert (stats.num_blocks, stats.kv_bytes) == (shared_stats.num_blocks, shared_stats.kv_bytes)
    for key, answer in found.items():
        assert answer.prompt_logprobs == pytest.approx(expected[key].prompt_logprobs, abs=1e-3)
        assert answer.token_ids == expected[key].token_ids
    wide, narrow = (three(3, "float32", batch_invariant=True, max_num_seqs=width, max_num_batched_tokens=17 * width)[0] for width in (4, 1))
    assert {key: (a.token_ids, a.logprobs, a.prompt_logprobs) for key, a in wide.items()} == {
        key: (a.token_ids, a.logprobs, a.prompt_logprobs) for key, a in narrow.items()
    }


@pytest.mark.full
def test_three_processes_are_no_less_exact_than_one(three):
    def errors(found) -> float:
        pairs = [zip(found[key].prompt_logprobs, exact[key].prompt_logprobs, strict=True) for key in exact]
        gaps = [abs(ours - theirs) for pair in pairs for ours, theirs in pair]
        return sum(gaps) / len(gaps)

    exact, _ = three(1, "float32", attention="sdpa")
    one, _ = three(1, "bfloat16", attention="sdpa")
    found, _ = three(3, "bfloat16")
    assert 0 < errors(found) < 1.5 * errors(one) < 0.5


def test_processes_neither_rehearse_nor_run_ahead(tiny_model, monkeypatch):
    """The others would have to do the same, in step."""
    monkeypatch.setattr(Device, "computes_apart", True)
    requests = rows(4)
    engine = engine_of(tiny_model, num_ranks=2)
    try:
        found = answers(engine, requests)
    finally:
        engine.close()
    assert type(engine) is Engine and engine.stats.warm_up_s == 0
    assert len(found) == sum(request.sampling.n for request in requests)


def workers_of(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_worker = b"engine.worker" in (folder / "cmdline").read_bytes()
            if is_worker and int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile
            continue
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")


@needs_proc
@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "worker 1 ended by SIGKILL"), pytest.param(signal.SIGSTOP, "a worker does not answer", marks=pytest.mark.full)],
)
def test_a_lost_worker_ends_the_engine_and_is_gone(tiny_model, monkeypatch, number, said):
    from engine.runner import parallel

    monkeypatch.setattr(parallel, "TIMEOUT_S", 2.0)
    engine = engine_of(tiny_model, num_ranks=2)
    (worker,) = workers_of(os.getpid())
    completions = engine.generate(rows(8))
    next(completions)
    os.kill(worker, number)
    with pytest.raises(WorkerLost, match=rf"engine\.tensor_parallel.*{said}"):
        list(completions)
    assert workers_of(os.getpid()) == []
    with pytest.raises(WorkerLost, match="have been ended"):
        list(engine.generate(rows(1)))
    engine.close()


@needs_proc
def test_a_worker_that_does_not_start_is_no_wait(tiny_model, monkeypatch):
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    with pytest.raises(WorkerLost, match=r"engine\.tensor_parallel=2: worker 1 ended with exit code 1"):
        engine_of(tiny_model, num_ranks=2)


@needs_proc
def test_a_worker_that_fails_says_why(tiny_model):
    engine = engine_of(tiny_model, num_ranks=2)
    engine.runner.team.announce("nonsense")
    with pytest.raises(WorkerLost, match=r"(?s)worker 1 ended with exit code 1; its last words.*AttributeError: 'str' object"):
        list(engine.generate(rows(1)))
    engine.close()


@needs_proc
def test_a_step_that_is_broken_off_ends_the_workers(tiny_model):
    """They are out of step with this process from there on: another step would add up what does not belong together."""
    engine = engine_of(tiny_model, num_ranks=2)

    def interrupted(hidden):
        raise KeyboardInterrupt

    engine.runner.forward.hidden = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(engine.generate(rows(1)))
    assert workers_of(os.getpid()) == []
    engine.close()


@needs_proc
@pytest.mark.full
def test_two_engines_in_one_process_do_not_meet(tiny_model):
    first, second = (engine_of(tiny_model, num_ranks=2) for _ in range(2))
    assert len(workers_of(os.getpid())) == 2
    one = answers(first, rows(3))
    other = answers(second, rows(3))
    first.close()
    assert len(workers_of(os.getpid())) == 1
    again = answers(second, rows(3))
    second.close()
    assert [a.token_ids for a in one.values()] == [a.token_ids for a in other.values()] == [a.token_ids for a in again.values()]
    assert workers_of(os.getpid()) == []


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ({}, {"tensor_parallel": 0}, r"engine\.tensor_parallel: 0 must be 1 or more"),
        ({}, {"tensor_parallel": 3}, r"engine\.tensor_parallel: 3 devices cannot share.*2 key/value heads.*choose one of 1, 2$"),
        ({"dtype": "bfloat16"}, {"tensor_parallel": 2, "attention": "cpu"}, r"engine\.attention: 'cpu'.*engine\.tensor_parallel=2"),
        ({"dtype": "bfloat16", "weights": "int8"}, {"tensor_parallel": 2}, r"model\.weights: int8.*engine\.tensor_parallel=2"),
    ],
)
@needs_proc
def test_what_cannot_be_shared_is_refused_by_key(tiny_model, model, settings, said):
    with pytest.raises(ValueError, match=said):
        Engine.from_config(
            model=ModelConfig(path=tiny_model, **model), engine=EngineConfig(**settings), kv_cache=KVCacheConfig(num_blocks=9)
        )
    assert workers_of(os.getpid()) == []


@needs_proc
def test_blocks_are_not_kept(tiny_model, tmp_path):
    cache = KVCacheConfig(num_blocks=9, persist=str(tmp_path))
    with pytest.raises(ValueError, match=r"kv_cache\.persist.*engine\.tensor_parallel"):
        Engine.from_config(model=ModelConfig(path=tiny_model), engine=EngineConfig(tensor_parallel=2), kv_cache=cache)
    assert workers_of(os.getpid()) == []


@needs_proc
def test_a_refused_pool_leaves_no_worker(tiny_model):
    """What is only refused when the weights are there, in every process."""
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"kv_cache\.num_blocks.*only"):
        engine_of(tiny_model, num_ranks=2, num_blocks=10**9)
    assert workers_of(os.getpid()) == []
    assert time.monotonic() - began < 60

"""A small model answered over the Triton kernels, in the interpreter, the same as over the reference, whatever the way."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, KVCacheConfig, ModelConfig, Request, SamplingParams
from engine.runner.fused import FusedForward

pytest.importorskip("triton", reason="triton is not installed: pip install -e '.[dev]'")

PROMPTS = [list(range(40, 75)), [*range(40, 72), 9, 8], [5, 4, 3]]


@pytest.fixture(scope="module")
def qwen3(tiny_model, tmp_path_factory) -> str:
    """The tiny model as a qwen3: with norms on the heads of queries and keys."""
    folder = tmp_path_factory.mktemp("qwen3") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}))
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(1)
    norms = (f"model.layers.{layer}.self_attn.{name}_norm.weight" for layer in range(2) for name in "qk")
    save_file(weights | {name: 1 + torch.randn(8, generator=noise) * 0.3 for name in norms}, folder / "model.safetensors")
    return str(folder)


def answers(
    path: str,
    *,
    attention: str,
    device: str = "cpu",
    num_blocks: int = 64,
    budget: int = 32,
    dtype: str = "float32",
    batch_invariant=False,
    **sampling,
):
    engine = Engine.from_config(
        model=ModelConfig(path=path, dtype=dtype),
        engine=EngineConfig(
            device=device, attention=attention, max_num_seqs=4, max_num_batched_tokens=budget, batch_invariant=batch_invariant
        ),
        kv_cache=KVCacheConfig(num_blocks=64),
    )
    params = SamplingParams(max_tokens=4, ignore_eos=True, **sampling)
    done = {c.request_id: c for c in engine.generate(Request(id=i, prompt_token_ids=p, sampling=params) for i, p in enumerate(PROMPTS))}
    return [done[i] for i in range(len(PROMPTS))], engine


GREEDY, BY_CHANCE = {"temperature": 0.0, "prompt_logprobs": 0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}


@pytest.mark.parametrize(("family", "sampling"), [("llama", BY_CHANCE), ("qwen3", GREEDY)], ids=["llama by chance", "qwen3 greedy"])
def test_answers_equal_the_reference(tiny_model, qwen3, device, family, sampling):
    path = qwen3 if family == "qwen3" else tiny_model
    expected, _ = answers(path, attention="reference", **sampling)
    found, engine = answers(path, attention="triton", device=device, **sampling)
    assert isinstance(engine.runner.forward, FusedForward)
    assert engine.runner.sampler.choose.__module__ == "engine.kernels.triton.sampling"
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert (a.prompt_logprobs or ())[1:] == pytest.approx((b.prompt_logprobs or ())[1:], abs=1e-4)


def test_bits_do_not_depend_on_the_way(tiny_model, device):
    """With batch_invariant, in chunks of up to 32 tokens and of up to 9."""
    ways = [answers(tiny_model, attention="triton", device=device, temperature=0.0, batch_invariant=True, budget=n)[0] for n in (32, 9)]
    first, second = ([(c.token_ids, c.logprobs) for c in done] for done in ways)
    assert first == second

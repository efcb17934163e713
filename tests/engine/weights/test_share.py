"""What each rank loads is a slice of the checkpoint, and the ranks' results together are the whole model's."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from engine.config import ModelConfig
from engine.layers.share import WHOLE, Share
from engine.weights import load_model

_SIZES = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
_MODELS = {
    "llama-biased": LlamaConfig(**_SIZES, intermediate_size=80, num_attention_heads=8, num_key_value_heads=4, attention_bias=True),
    "qwen2": Qwen2Config(**_SIZES, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, intermediate_size=64, num_attention_heads=12, num_key_value_heads=4, head_dim=16),
}


@pytest.fixture(scope="module", params=_MODELS)
def saved(request, tmp_path_factory):
    """A folder with a model of which no weight is 0, in two files."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(_MODELS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder, model


def load(folder, share: Share = WHOLE):
    return load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device="cpu", share=share)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_each_rank_has_its_slice_of_every_projection(saved, num_ranks):
    folder, model = saved
    state = model.state_dict()

    def heads_of(name, rank):
        return state[name].chunk(num_ranks)[rank] if name in state else None

    for rank in range(num_ranks):
        for i, layer in enumerate(load(folder, Share(rank=rank, num_ranks=num_ranks)).layers):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            for leaf in ("weight", "bias"):
                parts = [heads_of(f"{attention}.{name}_proj.{leaf}", rank) for name in "qkv"]
                fused = getattr(layer.self_attn.qkv_proj, leaf)
                assert parts[0] is None if fused is None else torch.equal(fused, torch.cat(parts))
            gate_up = torch.cat([heads_of(f"{mlp}.{name}_proj.weight", rank) for name in ("gate", "up")])
            assert torch.equal(layer.mlp.gate_up_proj.weight, gate_up)
            for module, name in ((layer.self_attn.o_proj, f"{attention}.o_proj"), (layer.mlp.down_proj, f"{mlp}.down_proj")):
                assert torch.equal(module.weight, state[f"{name}.weight"].chunk(num_ranks, dim=1)[rank])
                if module.bias is not None:
                    assert torch.equal(module.bias, state[f"{name}.bias"] if rank == 0 else torch.zeros(48))


def causal(layer, q_THD, k_TKD, v_TKD):
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_together_give_the_whole_model_s_logits(saved, num_ranks):
    """The ranks are threads that meet at every sum."""
    folder, _ = saved
    ids, positions = torch.arange(40), torch.arange(40)
    whole = load(folder)
    meeting = threading.Barrier(num_ranks)
    given: list = [None] * num_ranks
    logits: list = [None] * num_ranks

    def run(rank: int) -> None:
        def all_reduce(x):
            given[rank] = x
            meeting.wait(timeout=60)
            total = torch.stack(given).sum(0)
            meeting.wait(timeout=60)
            return total

        decoder = load(folder, Share(rank=rank, num_ranks=num_ranks, all_reduce=all_reduce))
        logits[rank] = decoder.logits(decoder(ids, positions, causal))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = whole.logits(whole(ids, positions, causal))
    assert expected.std() > 0.5
    for found in logits:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_heads_that_cannot_be_shared_are_refused_by_key(saved, num_ranks):
    folder, _ = saved
    with pytest.raises(ValueError, match=r"engine\.tensor_parallel: \d devices.*4 key/value heads.*choose one of 1, 2, 4$"):
        load(folder, Share(num_ranks=num_ranks))


@pytest.mark.parametrize(("rows", "named"), [(65, r"shape \[65, 48\]"), (68, "has shape")])
def test_a_projection_of_another_size_is_named_on_every_rank(tmp_path, rows, named):
    AutoModelForCausalLM.from_config(_MODELS["qwen2"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(rows, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in range(2):
        with pytest.raises(ValueError, match=rf"model\.path.*up_proj.*{named}.*config\.json"):
            load(tmp_path, Share(rank=rank, num_ranks=2))

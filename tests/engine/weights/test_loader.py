"""Folders of safetensors: whole, in shards, damaged, incomplete."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import ModelConfig
from engine.weights import load_model


def _load(folder):
    return load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device="cpu")


def test_fused_rows_are_the_parts_in_order(tiny_qwen3, tmp_path):
    tiny_qwen3.save_pretrained(tmp_path)
    state, decoder = tiny_qwen3.state_dict(), _load(tmp_path)
    for i, layer in enumerate(decoder.layers):
        parts = [state[f"model.layers.{i}.self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(parts))
        parts = [state[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))
    assert not any(parameter.is_meta for parameter in decoder.parameters())


def test_shards_load_as_the_whole(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path / "whole")
    tiny_llama.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = _load(tmp_path / "whole"), _load(tmp_path / "shards")
    for name, value in whole.named_parameters():
        assert torch.equal(value, shards.get_parameter(name)), name


def test_tied_head_is_the_embedding_itself(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path)
    decoder = _load(tmp_path)
    assert decoder.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()


def test_missing_tensor_is_named(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.path.*lack model\.layers\.1\.mlp\.up_proj\.weight"):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "named"), [("num_hidden_layers", 1, r"model\.layers\.1\."), ("attention_bias", False, r"_proj\.bias")]
)
def test_a_tensor_that_config_does_not_ask_for_is_named(tmp_path, key, value, named):
    """Half of a model, or one without its biases, would load and answer nonsense."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, attention_bias=True
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    _load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | {key: value}))
    with pytest.raises(ValueError, match=rf"model\.path.*hold .*{named}.*config\.json"):
        _load(tmp_path)


def test_tensors_that_follow_from_others_may_be_there(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    _load(tmp_path)


def test_wrong_shape_is_named(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(ValueError, match=r"model\.path.*gate_proj.*\[192, 64\].*\[200, 64\]"):
        _load(tmp_path)


def test_folder_without_weights_is_refused(tiny_llama, tmp_path):
    tiny_llama.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.path.*no model\.safetensors"):
        _load(tmp_path)
    torch.save(tiny_llama.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.path.*pytorch_model\.bin is a pickle"):
        _load(tmp_path)


def test_cut_and_absent_files_are_named(tiny_llama, tmp_path):
    tiny_llama.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=rf"model\.path.*{shards[0].name} is damaged"):
        _load(tmp_path)
    shards[0].unlink()
    with pytest.raises(ValueError, match=rf"model\.path.*lacks {shards[0].name}"):
        _load(tmp_path)

"""What a family refuses, it refuses by the name of the key in config.json."""

from __future__ import annotations

import json

import pytest

from engine import plugins
from engine.config import ModelConfig
from engine.weights import read_spec

_CONFIG = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("family", "change", "key"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"hidden_size": None}, "hidden_size"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("gpt_neox", {}, "gpt_neox"),
        ("", {}, "model_type"),
    ],
)
def test_refusals_name_the_key(tmp_path, family, change, key):
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG | {"model_type": family} | change))
    with pytest.raises(ValueError, match=rf"model\.path.*{key}"):
        read_spec(ModelConfig(path=str(tmp_path)))


def test_a_window_that_is_switched_off_is_served(tmp_path):
    config = _CONFIG | {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(ModelConfig(path=str(tmp_path))).qkv_bias


def test_every_family_is_a_file_with_a_spec():
    for name in plugins.names("engine.models"):
        assert plugins.load("engine.models", name, key="model.path").spec(_CONFIG | {"model_type": name}).num_layers == 2

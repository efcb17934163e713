"""Small checkpoints to load, and a cache folder that is the test's own."""

from __future__ import annotations

import pytest
import torch
import transformers


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _tiny(config) -> transformers.PreTrainedModel:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="session")
def tiny_llama():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _tiny(transformers.LlamaConfig(vocab_size=300, max_position_embeddings=64, tie_word_embeddings=True, **sizes))


@pytest.fixture(scope="session")
def tiny_qwen3():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return _tiny(transformers.Qwen3Config(vocab_size=300, max_position_embeddings=64, head_dim=32, **sizes))

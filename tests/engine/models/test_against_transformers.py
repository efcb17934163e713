"""Tiny random models of each family, saved by transformers, must give transformers' own logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers

from engine.config import ModelConfig
from engine.weights import load_model

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_MODELS = {
    "llama": transformers.LlamaConfig(**_SIZES),
    "llama-tied": transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-biased": transformers.LlamaConfig(**_SIZES, attention_bias=True),
    "llama-llama3-rope": transformers.LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "llama-linear-rope": transformers.LlamaConfig(**_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "qwen2": transformers.Qwen2Config(**_SIZES),
    "qwen3": transformers.Qwen3Config(**_SIZES, head_dim=16),
}


@pytest.fixture(scope="module", params=_MODELS)
def saved(request, tmp_path_factory):
    """A folder as save_pretrained writes it, and the model that it holds, with no weight left at 0 or 1."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(_MODELS[request.param], attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


def causal(layer, q_THD, k_TKD, v_TKD):
    """Attention over one whole sequence: an Attend that needs no cache."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_equal_transformers(saved, batch_invariant):
    folder, model = saved
    decoder = load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device="cpu", batch_invariant=batch_invariant)
    ids = torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(5))  # longer than llama3's original 32 positions
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    logits = decoder.logits(decoder(ids, torch.arange(len(ids)), causal))
    assert expected.std() > 0.5  # logits of which the differences mean something
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_bfloat16_stays_near(saved):
    folder, model = saved
    decoder = load_model(ModelConfig(path=str(folder)), dtype=torch.bfloat16, device="cpu")
    ids = torch.arange(40)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    logits = decoder.logits(decoder(ids, torch.arange(len(ids)), causal))
    assert logits.dtype == torch.float32
    assert F.cosine_similarity(logits, expected, dim=-1).min() > 0.99


def test_two_layouts_of_rope_settings_are_one(tmp_path):
    """transformers 4 wrote rope_theta and rope_scaling, transformers 5 writes rope_parameters."""
    import json

    from engine.weights.checkpoint import folder_spec

    new = transformers.LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE).to_dict()
    scaling = {key: value for key, value in _LLAMA3_ROPE.items() if key != "rope_theta"}
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | {"rope_theta": 500.0, "rope_scaling": scaling}
    specs = []
    for name, content in (("new", new), ("old", old)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        specs.append(folder_spec(tmp_path / name))
    assert specs[0] == specs[1]
    assert specs[0].rope.kind == "llama3"

"""The installed command and a model folder small enough to answer at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="session")
def command() -> str:
    """The installed ``pagemill``."""
    path = Path(sys.executable).parent / "pagemill"
    if not path.exists():
        pytest.skip("the pagemill command is not installed here: pip install -e .")
    return str(path)


@pytest.fixture
def pagemill(command: str, tmp_path: Path) -> Run:
    """``pagemill(*words)`` starts the command in an empty folder and returns what came out."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random llama of two layers over single bytes, as a Hugging Face folder."""
    import tokenizers
    import torch
    from safetensors.torch import save_file
    from tokenizers import decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))

    vocab, width, inner, layers = tokenizer.get_vocab_size(), 32, 64, 2
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocab, width), "lm_head": (vocab, width), "model.norm": (width,)}
    for layer in (f"model.layers.{index}" for index in range(layers)):
        shapes |= {f"{layer}.self_attn.{name}_proj": (size, width) for name, size in (("q", width), ("k", 16), ("v", 16), ("o", width))}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, width) for name in ("gate", "up")} | {f"{layer}.mlp.down_proj": (width, inner)}
        shapes |= {f"{layer}.{name}_layernorm": (width,) for name in ("input", "post_attention")}
    noise = torch.Generator().manual_seed(0)
    save_file({f"{name}.weight": torch.randn(shape, generator=noise) * 0.3 for name, shape in shapes.items()}, folder / "model.safetensors")
    return str(folder)

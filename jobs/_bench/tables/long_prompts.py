"""Prompts of ten thousand tokens and more, on a model of random weights that takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jobs._bench.tables import GIB, MIB, Line, Row, Setup, Table, peak_bytes

_VOCABULARY = 512
_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def points(setup: Setup) -> Mapping[str, list[str]]:
    model = setup.folder / "random-llama"
    _write_model(model)
    own = [f"model.path={model}", "model.tokenizer=null", "bench.rows=1", "bench.shared_tokens=0", "bench.max_tokens=16"]
    return {f"{length:,} tokens": [*own, f"bench.prompt_tokens={length}"] for length in setup.pick((10_000, 32_000), (2_000,))}


def rows(found: Mapping[str, Line]) -> list[Row]:
    return [
        {
            "prompt": name,
            "steps": line["steps"],
            "answered": line["generated_tokens"],
            "prefill tokens/s": line["prefill_tokens_per_s"],
            "first token, s": line["time_to_first_token_s"]["mean"],
            "decode tokens/s": line["decode_tokens_per_s"],
            "99 % of steps, s": line["step_s_p99"],
            "KV at its peak, MiB": line["kv_bytes_peak"] / MIB,
            "peak memory, GiB": peak_bytes(line) / GIB,
        }
        for name, line in found.items()
    ]


def _write_model(folder: Path) -> None:
    """A llama of 4 layers in a Hugging Face folder, its weights normal with a standard deviation of 0.02, and a tokenizer of numbers."""
    import tokenizers
    import torch
    from safetensors.torch import save_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder.mkdir()
    save_model(LlamaForCausalLM(LlamaConfig(**_MODEL)), str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(_MODEL))
    words = tokenizers.models.WordLevel({str(number): number for number in range(_VOCABULARY)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))


TABLE = Table(
    title="Long prompts",
    read=(
        "One row on a llama of 4 layers with random weights and room for 40,960 tokens, with 2 heads of 64 for keys and values: prompts "
        "are computed in chunks, so a longer one takes more steps, and no more memory than its own keys and values."
    ),
    columns={
        "prompt": "{}",
        "steps": "{:,}",
        "answered": "{:,}",
        "prefill tokens/s": "{:,.0f}",
        "first token, s": "{:.2f}",
        "decode tokens/s": "{:,.0f}",
        "99 % of steps, s": "{:.3f}",
        "KV at its peak, MiB": "{:,.1f}",
        "peak memory, GiB": "{:.2f}",
    },
    plot="first token, s",
    points=points,
    rows=rows,
)

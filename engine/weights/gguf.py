"""Rewrites a GGUF file as a Hugging Face folder: config.json, tokenizer files, float32 safetensors.

Knows both formats' names and layouts; where the folder lies and when to write it is the checkpoint's business.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from engine.weights.cache import replacing
from engine.weights.gguf_tokenizer import tokenizer_files

# Raise it when the files written here change, so that older entries of the cache are left alone.
CONVERSION = 1

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _File:
    """One open GGUF file: its metadata by key and its tensors by their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = GGUFReader(path)
        except ValueError as error:
            raise ValueError(f"model.path: {path} is not a readable GGUF file ({error})") from None
        self.arch = str(self.get("general.architecture"))
        if self.get("split.count", 1) > 1:
            raise ValueError(f"model.path: {path} is one of several parts; join them with llama-gguf-split --merge")

    def get(self, key: str, *default: Any) -> Any:
        field = self.reader.get_field(key)
        if field is not None:
            return field.contents()
        if not default:
            raise ValueError(f"model.path: {self.path} lacks the metadata key {key}")
        return default[0]

    def tensors(self) -> dict[str, ReaderTensor]:
        return {self.hf_name(tensor.name): tensor for tensor in self.reader.tensors}

    def hf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if block is None or block[2] not in _BLOCK:
            hint = "; Llama 3's rope scaling is read from safetensors only" if stem == "rope_freqs" else ""
            raise ValueError(f"model.path: {self.path} has a tensor {name} that is not served{hint}")
        return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{kind}"


def convert_metadata(path: Path, folder: Path) -> None:
    """Write the JSON files; config.json comes last, so a folder that has it has them all.

    Raises:
        ValueError: the file is no GGUF, lacks a key, or holds what is not served; the message names it.
    """
    file = _File(path)
    files = {**tokenizer_files(file.get, path=path), "config.json": _config(file)}
    for name, content in files.items():
        with replacing(folder / name) as out:
            out.write(json.dumps(content, ensure_ascii=False).encode())


def convert_weights(path: Path, folder: Path) -> None:
    """Write model.safetensors: every tensor dequantised to float32, one at a time, in the file's order."""
    file = _File(path)
    tensors = file.tensors()
    with replacing(folder / "model.safetensors") as out:
        _write_header(out, {name: [int(size) for size in reversed(tensor.shape)] for name, tensor in tensors.items()})
        for values in _dequantised(file, tensors):
            out.write(values.data)


def _config(file: _File) -> dict[str, Any]:
    arch, tensors = file.arch, file.tensors()
    num_heads = int(file.get(f"{arch}.attention.head_count"))
    hidden_size = int(file.get(f"{arch}.embedding_length"))
    num_rows = int(tensors["model.embed_tokens.weight"].shape[1])
    num_tokens = len(file.get("tokenizer.ggml.tokens", ()))
    if num_tokens > num_rows:
        raise ValueError(f"model.path: {file.path} lists {num_tokens} tokens, but its embedding has only {num_rows} rows")
    config: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": num_rows,
        "hidden_size": hidden_size,
        "intermediate_size": int(file.get(f"{arch}.feed_forward_length")),
        "num_hidden_layers": int(file.get(f"{arch}.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(file.get(f"{arch}.attention.head_count_kv", num_heads)),
        "head_dim": int(file.get(f"{arch}.attention.key_length", hidden_size // num_heads)),
        "max_position_embeddings": int(file.get(f"{arch}.context_length")),
        "rms_norm_eps": float(file.get(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(file.get(f"{arch}.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": arch != "qwen2" and "model.layers.0.self_attn.q_proj.bias" in tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id", None),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id", None),
    }
    scaling = file.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": file.get(f"{arch}.rope.scaling.factor")}
    return config


def _dequantised(file: _File, tensors: dict[str, ReaderTensor]) -> Iterator[NDArray[np.float32]]:
    num_heads = int(file.get(f"{file.arch}.attention.head_count"))
    num_kv_heads = int(file.get(f"{file.arch}.attention.head_count_kv", num_heads))
    for name, tensor in tensors.items():
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if file.arch == "llama" and ".q_proj." in name:
            values = _half_split(values, num_heads)
        elif file.arch == "llama" and ".k_proj." in name:
            values = _half_split(values, num_kv_heads)
        yield np.ascontiguousarray(values)


def _half_split(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp stores llama's rotary pairs side by side (0, 1), (2, 3), ...; back to (0, D/2), (1, D/2 + 1), ..."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_header(out: IO[bytes], shapes: dict[str, list[int]]) -> None:
    """The safetensors header (its format page): u64 little-endian length, then JSON with each tensor's byte range."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # keeps the tensors aligned
    out.write(len(text).to_bytes(8, "little") + text)

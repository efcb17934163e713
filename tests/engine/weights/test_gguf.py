"""GGUF files written with llama.cpp's own library must load as the models that they were made from."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.config import ModelConfig
from engine.tokenizer import Tokenizer
from engine.weights import checkpoint_folder, load_model, read_spec


def _byte_tokens() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(256 - len(plain))]


def _permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of llama."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(path, model, *, arch: str, leave_out=(), quantise=None, num_tokens: int | None = None, add_bos: bool = False) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<unk>", "<s>", "</s>", *_byte_tokens(), "ab"]
    tokens += [f"[PAD{i}]" for i in range((num_tokens or config.vocab_size) - len(tokens))]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257
    kinds += [gguf.TokenType.UNUSED] * (len(tokens) - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_add_bos_token(add_bos)
    if "bos" not in leave_out:
        writer.add_bos_token_id(1)
    if "eos" not in leave_out:
        writer.add_eos_token_id(2)
    arch_id = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            values = _permuted(values, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            values = _permuted(values, config.num_key_value_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_weights_come_back_bit_for_bit(arch, request, cache, tmp_path):
    model = request.getfixturevalue(f"tiny_{arch}")
    write(tmp_path / "m.gguf", model, arch=arch)
    model.save_pretrained(tmp_path / "folder")
    ours = load_model(ModelConfig(path=str(tmp_path / "m.gguf")), dtype=torch.float32, device="cpu")
    source = load_model(ModelConfig(path=str(tmp_path / "folder")), dtype=torch.float32, device="cpu")
    for name, value in source.named_parameters():
        assert torch.equal(ours.get_parameter(name), value), name
    assert ours.spec.rope == source.spec.rope
    assert ours.spec.head_dim == source.spec.head_dim


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0], ids=lambda kind: kind.name)
def test_quantised_weights_are_the_steps_of_their_block(kind, tiny_qwen3, cache, tmp_path):
    """Q4_1 and Q8_0 round to 16 and 255 even steps over the range of 32 numbers, so no number moves by over half a step."""
    write(tmp_path / "m.gguf", tiny_qwen3, arch="qwen3", quantise=kind)
    found = load_file(checkpoint_folder(ModelConfig(path=str(tmp_path / "m.gguf"))) / "model.safetensors")
    for name, value in tiny_qwen3.state_dict().items():
        if value.ndim == 1:
            assert torch.equal(found[name], value)
            continue
        blocks, ours = value.reshape(-1, 32), found[name].reshape(-1, 32)
        q4 = kind == gguf.GGMLQuantizationType.Q4_1
        step = (blocks.amax(1) - blocks.amin(1)) / 15 if q4 else blocks.abs().amax(1) / 127
        assert ((ours - blocks).abs().amax(1) <= 0.51 * step + 2e-3 * blocks.abs().amax(1)).all()  # scales are rounded to half floats


def test_second_start_converts_nothing(tiny_llama, cache, tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write(path, tiny_llama, arch="llama")
    folder = checkpoint_folder(ModelConfig(path=str(path)))
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    (tmp_path / "copy.gguf").write_bytes(path.read_bytes())
    assert checkpoint_folder(ModelConfig(path=str(tmp_path / "copy.gguf"))) == folder  # the content is the key
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == times


def test_planning_writes_no_weights(tiny_llama, cache, tmp_path):
    write(tmp_path / "m.gguf", tiny_llama, arch="llama")
    config = ModelConfig(path=str(tmp_path / "m.gguf"))
    assert read_spec(config).num_layers == 2
    assert Tokenizer.load(config).encode("abba") != []
    assert list(cache.rglob("*.safetensors")) == []


def test_two_starts_at_once_agree(tiny_llama, cache, tmp_path):
    write(tmp_path / "m.gguf", tiny_llama, arch="llama")
    config = ModelConfig(path=str(tmp_path / "m.gguf"))
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: checkpoint_folder(config), range(4)))
    assert len(folders) == 1
    assert sorted(path.name for path in folders.pop().iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_tokenizer_comes_along(tiny_llama, cache, tmp_path):
    write(tmp_path / "m.gguf", tiny_llama, arch="llama", add_bos=True)
    tokenizer = Tokenizer.load(ModelConfig(path=str(tmp_path / "m.gguf")))
    text = "aabab é 漢字 \n\n 🙂"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids.count(259) == 2  # the merge
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == (2,)
    assert not tokenizer.has_chat_template


def test_a_file_without_its_end_token_is_refused(tiny_llama, cache, tmp_path):
    write(tmp_path / "m.gguf", tiny_llama, arch="llama", leave_out=("bos", "eos"), add_bos=True)
    with pytest.raises(ValueError, match=r"lacks tokenizer\.ggml\.eos_token_id and tokenizer\.ggml\.bos_token_id"):
        read_spec(ModelConfig(path=str(tmp_path / "m.gguf")))


def test_a_vocabulary_past_the_embedding_is_refused(tiny_llama, cache, tmp_path):
    write(tmp_path / "m.gguf", tiny_llama, arch="llama", num_tokens=320)
    with pytest.raises(ValueError, match=r"model\.path.*320 tokens.*300 rows"):
        read_spec(ModelConfig(path=str(tmp_path / "m.gguf")))


def test_what_is_no_gguf_is_refused(cache, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"not a model at all, but long enough to have a header")
    with pytest.raises(ValueError, match=r"model\.path.*not a readable GGUF"):
        read_spec(ModelConfig(path=str(tmp_path / "m.gguf")))


def test_converted_config_is_what_the_file_says(tiny_qwen3, cache, tmp_path):
    write(tmp_path / "m.gguf", tiny_qwen3, arch="qwen3")
    config = json.loads((checkpoint_folder(ModelConfig(path=str(tmp_path / "m.gguf")), weights=False) / "config.json").read_text())
    own = tiny_qwen3.config
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert {key: config[key] for key in same} == {key: getattr(own, key) for key in same}
    assert config["rms_norm_eps"] == pytest.approx(own.rms_norm_eps)

"""Rewrites a GGUF file's byte-level BPE vocabulary as tokenizer.json and tokenizer_config.json.

Knows what llama.cpp's names for splitting rules mean in the tokenizers library; knows no tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class _TokenType(IntEnum):
    """llama.cpp's kinds of token that are matched as a whole before any splitting."""

    CONTROL = 3
    USER_DEFINED = 4


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SYMBOLS_AND_BLANKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# tokenizer.ggml.pre -> how text is cut before the merges
_PRE_TOKENIZERS = {
    "default": _byte_level(use_regex=True),
    "gpt-2": _byte_level(use_regex=True),
    # The original cuts single digits off first, which changes only how blanks before a digit are cut. transformers' GGUF
    # reader leaves that step out, and giving the same ids as transformers for the same file is what we promise.
    "smollm": _byte_level(use_regex=True),
    "llama-bpe": _sequence(_split(_CONTRACTIONS + r"\p{N}{1,3}" + _SYMBOLS_AND_BLANKS), _byte_level(use_regex=False)),
    "qwen2": _sequence(_split(_CONTRACTIONS + r"\p{N}" + _SYMBOLS_AND_BLANKS), _byte_level(use_regex=False)),
}


def tokenizer_files(get: Callable[..., Any], *, path: Path) -> dict[str, dict[str, Any]]:
    """File name -> content; ``get(key)`` or ``get(key, default)`` reads the file's metadata.

    A vocabulary of another kind gives no tokenizer.json: the weights can still be used with ``model.tokenizer``.

    Raises:
        ValueError: keys are missing without which generation would never stop or start wrongly.
    """
    kind, pre = get("tokenizer.ggml.model", None), get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        log.warning("%s: its tokenizer (%s, %s) is not converted; set model.tokenizer to a folder or hub id", path, kind, pre)
        return {}
    tokens = get("tokenizer.ggml.tokens")
    add_bos = bool(get("tokenizer.ggml.add_bos_token", False))
    wanted = ["tokenizer.ggml.eos_token_id", *(["tokenizer.ggml.bos_token_id"] if add_bos else [])]
    missing = [key for key in wanted if get(key, None) is None]
    if missing:
        raise ValueError(f"model.path: {path} lacks {' and '.join(missing)}; set them with gguf-new-metadata, or use another file")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"tokenizer.ggml.{key}_token_id", None) for name, key in names.items()}
    settings = {name: tokens[id_] for name, id_ in ids.items() if id_ is not None}
    return {
        "tokenizer.json": _tokenizer_json(get, tokens=tokens, pre=pre, bos=settings["bos_token"] if add_bos else None),
        "tokenizer_config.json": {
            **settings,
            "add_bos_token": add_bos,
            "clean_up_tokenization_spaces": False,
            "chat_template": get("tokenizer.chat_template", None),
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }


def _tokenizer_json(get: Callable[..., Any], *, tokens: list[str], pre: str, bos: str | None) -> dict[str, Any]:
    """The tokenizers library's own file format; ``bos`` is the token to put in front, if any."""
    vocab = {token: index for index, token in enumerate(tokens)}
    whole = [index for index, kind in enumerate(get("tokenizer.ggml.token_type", ())) if kind in list(_TokenType)]
    kinds = get("tokenizer.ggml.token_type", ())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    start: list[dict[str, Any]] = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos else []
    template = {
        "type": "TemplateProcessing",
        "single": start + single,
        "pair": start + single + [{"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [vocab[bos]], "tokens": [bos]}} if bos else {},
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], "special": kinds[i] == _TokenType.CONTROL, **flags} for i in whole],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": template if bos else None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": vocab,
            "merges": [merge.split(" ") for merge in get("tokenizer.ggml.merges")],
        },
    }

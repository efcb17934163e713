"""Turns ``model.path`` into a folder laid out as Hugging Face does, whatever it named, and reads its config.

Knows folders and their JSON files; tensors are the loader's, the GGUF format is gguf's.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from engine import plugins
from engine.config import ModelConfig
from engine.layers.spec import DecoderSpec
from engine.weights.cache import cache_root, sha256_of

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_JSON_FILES = ["*.json", "*.jinja"]
log = logging.getLogger(__name__)


def checkpoint_folder(config: ModelConfig, *, weights: bool = True) -> Path:
    """The folder that holds the model: config.json, tokenizer.json and, with ``weights``, the safetensors.

    A .gguf file is converted into the cache on first use; a hub id is downloaded by huggingface_hub into its cache.

    Raises:
        ValueError: there is no such model, or its file does not hash to ``model.sha256``.
    """
    if config.path.startswith("package:"):
        return _from_package(config, weights=weights)
    path = Path(config.path).expanduser()
    if path.suffix == ".gguf":
        return _from_gguf(path, config, weights=weights)
    if config.sha256 is not None:
        log.warning("model.sha256 is not checked: it belongs to a .gguf file, and model.path is %s", config.path)
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"model.path: {path} is a file, but neither a folder nor a .gguf file")
    if _HUB_ID.fullmatch(config.path) and not config.path.startswith("."):
        return hub_folder(config.path, revision=config.revision, weights=weights, key="model.path")
    raise ValueError(f"model.path: there is no folder {path}; give a folder with safetensors, a .gguf file or a hub id such as owner/name")


def tokenizer_folder(name: str) -> Path:
    """The folder that ``model.tokenizer`` names, fetched from the hub where it is no folder here."""
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else hub_folder(name, revision=None, weights=False, key="model.tokenizer")


def hub_folder(hub_id: str, *, revision: str | None, weights: bool, key: str) -> Path:
    """The local snapshot of a hub repository: only JSON, templates and, with ``weights``, safetensors.

    Raises:
        ValueError: it is neither downloaded nor within reach; the message names ``key``.
    """
    import huggingface_hub  # here, because a local model needs none of it

    patterns = [*_JSON_FILES, "*.safetensors"] if weights else _JSON_FILES
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{key}: {hub_id} is no folder here and could not be fetched from the hub ({reason}); "
            "check the name, go online once, or give a local folder or .gguf file"
        ) from error


def read_json(path: Path, *, key: str = "model.path") -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ValueError: it is missing or no JSON object; the message names ``key``.
    """
    if not path.is_file():
        raise ValueError(f"{key}: {path.parent} has no {path.name}, so it is not a model folder; give one as save_pretrained writes it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{key}: {path} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{key}: {path} is not a JSON object")
    return content


def read_spec(config: ModelConfig) -> DecoderSpec:
    """The architecture at ``model.path``, without touching its weights.

    Raises:
        ValueError: there is no such model, or it is of a kind that is not served; the message names the key.
    """
    return folder_spec(checkpoint_folder(config, weights=False))


class KVShape(NamedTuple):
    """What of a model decides the size of its keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int


def read_kv_shape(config: ModelConfig) -> KVShape:
    """The shape at ``model.path``, of any model whose config.json has the usual names, whether its kind is served or not.

    Raises:
        ValueError: there is no such model, or a name is missing; the message names ``model.path``.
    """
    file = checkpoint_folder(config, weights=False) / "config.json"
    values = read_json(file)
    values = values.get("text_config") or values
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
    missing = [name for name in names if type(values.get(name)) is not int]
    if missing:
        raise ValueError(f"model.path: {file} has no whole number {missing[0]}, so the size of its keys and values is unknown")
    num_layers, num_heads, hidden_size, limit = (values[name] for name in names)
    return KVShape(num_layers, values.get("num_key_value_heads") or num_heads, values.get("head_dim") or hidden_size // num_heads, limit)


def folder_spec(folder: Path) -> DecoderSpec:
    """The architecture in a checkpoint folder."""
    config = read_json(folder / "config.json")
    if not config.get("model_type"):
        raise ValueError(f"model.path: {folder / 'config.json'} lacks model_type")
    family = plugins.load("engine.models", config["model_type"], key="model.path")
    try:
        spec: DecoderSpec = family.spec(config)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"model.path: {folder / 'config.json'} has a value of a wrong type: {error}") from error
    return spec


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: all of generation_config.json's, else config.json's; often more than one."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(token_id) is int for token_id in ids):
                raise ValueError(f"model.path: {folder / name} has eos_token_id={found!r}, which is neither a token id nor a list of them")
            return tuple(ids)
    return ()


def _from_package(config: ModelConfig, *, weights: bool) -> Path:
    package, _, name = config.path.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(package)  # locates it, imports nothing
    for root in (found.submodule_search_locations or ()) if found else ():
        if (Path(root) / name).is_file():
            return _from_gguf(Path(root) / name, config, weights=weights)
    if config.fallback is None:
        raise ValueError(f"model.path: no installed package {package} holds {name}; install it, or name another model")
    log.warning("model.path: no installed package %s holds %s; using %s from the hub", package, name, config.fallback)
    return checkpoint_folder(replace(config, path=config.fallback, sha256=None, fallback=None), weights=weights)


def _from_gguf(path: Path, config: ModelConfig, *, weights: bool) -> Path:
    from engine.weights import gguf  # here, because it loads numpy and the format's library

    if not path.is_file():
        raise ValueError(f"model.path: there is no file {path}")
    digest = sha256_of(path)
    if config.sha256 not in (None, digest):
        raise ValueError(
            f"model.sha256: {path} hashes to {digest}, not to {config.sha256}; "
            "replace the file, or set model.sha256=null if this file is the one you mean"
        )
    folder = cache_root() / "gguf" / f"{digest}-{gguf.CONVERSION}"
    if not (folder / "config.json").exists():
        gguf.convert_metadata(path, folder)
    if weights and not (folder / "model.safetensors").exists():
        gguf.convert_weights(path, folder)
    return folder

"""Where a run's answers come from: the record that lies beside them, and the fingerprint of what changes them.

Knows which settings change answers and which only change the speed.
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from engine import EngineConfig, ModelConfig, Tokenizer, model_identity
from jobs._schema import RunConfig
from pipeline import Provenance

_LIBRARIES = (
    "pagemill",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "llguidance",
    "pyarrow",
    "hydra-core",
    "jinja2",
    "numpy",
)
# These say where a model's files lie; what is in them counts as model.files, and as model.template_hash.
_PLACES = ("model.path", "model.revision", "model.sha256", "model.fallback", "model.tokenizer", "model.chat_template")
# Other formats quantise a block at a time, so their numbers depend on its size.
_PLAIN_FORMATS = ("auto", "fp32", "bf16", "fp16")


def provenance(config: RunConfig, tokenizer: Tokenizer) -> Provenance:
    """The whole configuration and the versions for the record, and the fingerprint that a resumed run must share.

    Raises:
        ValueError: a prompt file cannot be read.
    """
    return Provenance(
        config=asdict(config),
        fingerprint=_fingerprint(config, tokenizer),
        versions={"python": platform.python_version()} | {name: version(name) for name in _LIBRARIES},
    )


def dtype_name(model: ModelConfig, engine: EngineConfig) -> str:
    """What ``model.dtype`` comes to on this machine: auto is not the same everywhere, and answers differ with it."""
    from engine.device import Device  # here, because it loads torch

    return str(Device.find(engine.device).dtype(model.dtype)).removeprefix("torch.")


def _fingerprint(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Dotted keys, so that a difference reads as the override that makes it. Files count by their content, not by their place.

    Speed-only settings are left out: answers do not depend on them but for the last digits of a float. Where
    ``engine.batch_invariant`` promises those too, what computes them counts.
    """
    exact = config.engine.batch_invariant
    plain = config.kv_cache.format in _PLAIN_FORMATS
    return {
        **{key: value for key, value in _keys("model", config.model).items() if key not in _PLACES},
        "model.files": model_identity(config.model),
        "model.dtype": dtype_name(config.model, config.engine),
        "model.template_hash": tokenizer.template_hash,
        "engine.max_model_len": config.engine.max_model_len,
        "engine.batch_invariant": exact,
        "engine.attention": config.engine.attention if exact else None,
        "engine.tensor_parallel": config.engine.tensor_parallel if exact else None,
        "kv_cache.format": config.kv_cache.format,
        "kv_cache.block_size": None if plain else config.kv_cache.block_size,
        **_keys("sampling", config.sampling),
        "seed": config.seed,
        "job.name": config.job.name,
        "prompt.system": config.prompt.text("system"),
        "prompt.template": config.prompt.text("template"),
        "prompt.response_format": config.prompt.text("response_format"),
        "prompt.messages_column": config.prompt.messages_column,
        "prompt.control_words": config.prompt.control_words,
        "prompt.on_overflow": None if config.prompt.on_overflow == "error" else config.prompt.on_overflow,
        "prompt.continue_final_message": config.prompt.continue_final_message,
        "input.columns": config.input.columns,
        "input.id_column": config.input.id_column,
        "output.format": config.output.format,
        "output.prefix": config.output.prefix,
        "output.token_ids": config.output.token_ids,
        "output.logprobs": config.output.logprobs,
    }


def _keys(group: str, values: Any) -> dict[str, Any]:
    return {f"{group}.{key}": value for key, value in asdict(values).items()}

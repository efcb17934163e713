"""Where a run's answers come from: the record that lies beside them, and the fingerprint of what changes them.

Knows which settings change answers and which only change the speed.
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from engine import EngineConfig, ModelConfig, Tokenizer
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
    """Dotted keys, so that a difference reads as the override that makes it. Prompt files count by their text."""
    return {
        **_keys("model", config.model),
        "model.dtype": dtype_name(config.model, config.engine),
        "model.template_hash": tokenizer.template_hash,
        "engine.max_model_len": config.engine.max_model_len,
        "kv_cache.format": config.kv_cache.format,
        **_keys("sampling", config.sampling),
        "seed": config.seed,
        "job.name": config.job.name,
        "prompt.system": config.prompt.text("system"),
        "prompt.template": config.prompt.text("template"),
        "prompt.response_format": config.prompt.text("response_format"),
        "prompt.messages_column": config.prompt.messages_column,
        "prompt.control_words": config.prompt.control_words,
        "prompt.continue_final_message": config.prompt.continue_final_message,
        "input.columns": config.input.columns,
        "output.format": config.output.format,
        "output.prefix": config.output.prefix,
        "output.token_ids": config.output.token_ids,
        "output.logprobs": config.output.logprobs,
    }


def _keys(group: str, values: Any) -> dict[str, Any]:
    return {f"{group}.{key}": value for key, value in asdict(values).items()}

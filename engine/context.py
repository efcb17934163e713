"""How many tokens a prompt and its answer may have together, as far as the model and the settings say.

Reads the model's config; the KV pool may hold less, which only a machine can tell.
"""

from __future__ import annotations

from engine.config import EngineConfig, ModelConfig
from engine.layers.spec import DecoderSpec
from engine.weights import read_spec


def context_length(model: ModelConfig, engine: EngineConfig) -> int:
    """``engine.max_model_len``, or the model's own limit where that is null.

    Raises:
        ValueError: it is more than the model's positions, or there is no such model; the message names the key.
    """
    return max_model_len(engine, spec=read_spec(model))


def max_model_len(engine: EngineConfig, *, spec: DecoderSpec) -> int:
    """The same for a model whose ``spec`` is known."""
    limit = spec.max_position_embeddings
    if engine.max_model_len is not None and engine.max_model_len > limit:
        raise ValueError(f"engine.max_model_len: {engine.max_model_len} is over the {limit} positions that the model knows")
    return engine.max_model_len or limit

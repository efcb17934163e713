"""Tokens in, tokens out: paged KV cache, continuous batching, shared-prefix caching.

The names below are the public surface; they load on first use, so that ``import engine`` stays free of torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Read by torch's OpenMP runtime when it loads, which is later: threads that wait sleep. By default they spin, and on a
# machine that is not ours alone every parallel loop then waits for a thread that the spinning ones keep off its core:
# measured on two shared cores, 29 s of work took 120 to 350 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Read by the tokenizers library at each call: one thread is faster than a model's step, and the others are the model's.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if TYPE_CHECKING:
    from engine import plugins
    from engine.config import EngineConfig, KVCacheConfig, ModelConfig, parse_bytes
    from engine.context import context_length
    from engine.forecast import Forecast, Outlook, Pool
    from engine.grammar.compiler import check_grammar
    from engine.grammar.spec import Grammar
    from engine.kv.capacity import Capacity
    from engine.loop import Engine
    from engine.sampling_params import SamplingParams
    from engine.tokenizer import Tokenizer, TokenizerMissing
    from engine.weights.cache import cache_root
    from engine.weights.identity import model_identity
from engine.types import Completion, Request, WorkerLost

__all__ = [
    "Capacity",
    "Completion",
    "Engine",
    "EngineConfig",
    "Forecast",
    "Grammar",
    "KVCacheConfig",
    "ModelConfig",
    "Outlook",
    "Pool",
    "Request",
    "SamplingParams",
    "Tokenizer",
    "TokenizerMissing",
    "WorkerLost",
    "cache_root",
    "check_grammar",
    "context_length",
    "model_identity",
    "parse_bytes",
    "plugins",
]

_HOME = {
    "Capacity": "engine.kv.capacity",
    "Completion": "engine.types",
    "Engine": "engine.loop",
    "EngineConfig": "engine.config",
    "Forecast": "engine.forecast",
    "Grammar": "engine.grammar.spec",
    "KVCacheConfig": "engine.config",
    "ModelConfig": "engine.config",
    "Outlook": "engine.forecast",
    "Pool": "engine.forecast",
    "Request": "engine.types",
    "SamplingParams": "engine.sampling_params",
    "Tokenizer": "engine.tokenizer",
    "TokenizerMissing": "engine.tokenizer",
    "WorkerLost": "engine.types",
    "cache_root": "engine.weights.cache",
    "model_identity": "engine.weights.identity",
    "check_grammar": "engine.grammar.compiler",
    "context_length": "engine.context",
    "parse_bytes": "engine.config",
}


def __getattr__(name: str) -> Any:
    if name == "plugins":
        return importlib.import_module("engine.plugins")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

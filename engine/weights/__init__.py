"""From ``model.path`` to a decoder with weights; ``read_spec`` and ``checkpoint_folder`` need no torch.

Knows where checkpoints lie and how they are written, nothing of what runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.weights.checkpoint import checkpoint_folder, read_kv_shape, read_spec

if TYPE_CHECKING:
    from engine.weights.loader import load_model

__all__ = ["checkpoint_folder", "load_model", "read_kv_shape", "read_spec"]


def __getattr__(name: str) -> Any:
    if name == "load_model":
        from engine.weights.loader import load_model  # here, because it loads torch

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

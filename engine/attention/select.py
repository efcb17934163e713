"""Chooses the attention backend: the named one or, with "auto", the first that can serve.

Knows the backends by file name only; whether one can serve is its own answer.
"""

from __future__ import annotations

from typing import Any

from engine import plugins
from engine.attention.backend import AttentionBackend, AttentionSpec

_PACKAGE, _KEY = "engine.attention.backends", "engine.attention"

# The order in which "auto" asks on a device: the fastest first, last the one that serves everything.
AUTO_ORDER = {"cpu": ("cpu", "sdpa", "reference"), "cuda": ("flash", "triton", "sdpa", "reference")}


def select(name: str, *, spec: AttentionSpec) -> AttentionBackend[Any]:
    """The backend called ``name``, built for ``spec``.

    Raises:
        ValueError: there is none of that name, or it cannot serve ``spec``; the message names engine.attention and why.
    """
    if name != "auto":
        module = plugins.load(_PACKAGE, name, key=_KEY)
        if (reason := module.refuse(spec)) is not None:
            raise ValueError(f"{_KEY}: {name!r} cannot serve this run: {reason}")
        return module.Backend(spec)
    reasons = []
    for candidate in AUTO_ORDER[spec.device.type]:
        module = plugins.load(_PACKAGE, candidate, key=_KEY)
        if (reason := module.refuse(spec)) is None:
            return module.Backend(spec)
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"{_KEY}: no backend can serve this run ({'; '.join(reasons)})")

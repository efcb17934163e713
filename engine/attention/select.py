"""Chooses the attention backend: the named one or, with "auto", the first that can serve.

Knows the backends by file name only; whether one can serve is its own answer.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import ModuleType
from typing import Any

from engine import plugins
from engine.attention.backend import AttentionBackend, AttentionSpec
from engine.kv.format import format_name

_PACKAGE, _KEY = "engine.attention.backends", "engine.attention"

# The order in which "auto" asks on a device: the fastest first, last the one that serves everything.
AUTO_ORDER = {"cpu": ("cpu", "sdpa", "reference"), "cuda": ("flash", "triton", "sdpa", "reference")}
log = logging.getLogger(__name__)


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
    reasons: dict[str, str] = {}
    for candidate in AUTO_ORDER[spec.device.type]:
        module = plugins.load(_PACKAGE, candidate, key=_KEY)
        if (reason := module.refuse(spec)) is None:
            _warn_of_format(spec, candidate, passed_over=reasons)
            return module.Backend(spec)
        reasons[candidate] = reason
    raise ValueError(f"{_KEY}: no backend can serve this run ({'; '.join(map(': '.join, reasons.items()))})")


def _warn_of_format(spec: AttentionSpec, chosen: str, *, passed_over: dict[str, str]) -> None:
    """Where a faster backend would serve but for ``kv_cache.format``."""
    plain = replace(spec, kv_format=format_name("auto", model_dtype=str(spec.dtype).removeprefix("torch.")))
    for name, reason in passed_over.items():
        module: ModuleType = plugins.load(_PACKAGE, name, key=_KEY)
        if module.refuse(plain) is None:
            log.warning("kv_cache.format=%s: %s attends, which is slower than %s: %s", spec.kv_format, chosen, name, reason)
            return

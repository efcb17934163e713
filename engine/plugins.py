"""Finds a part by its file name: ``load("engine.attention.backends", "sdpa")`` is that module.

Knows nothing of what the modules hold; the folder listing is the list of choices.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def names(package: str) -> list[str]:
    """The choices in ``package``: its modules by file name, sorted; modules with a leading underscore are private."""
    return sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__) if not m.name.startswith("_"))


def load(package: str, name: str, *, key: str) -> ModuleType:
    """Import ``package``'s module called ``name``.

    Raises:
        ValueError: there is no such module; the message names ``key`` and lists the choices.
    """
    known = names(package)
    if name not in known:
        raise ValueError(f"{key}: there is no {name!r}; choose one of {', '.join(known)}")
    return importlib.import_module(f"{package}.{name}")

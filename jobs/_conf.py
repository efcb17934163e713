"""Where the installed configuration lies and what is in it: groups are folders, options are files.

Reads names and text only: no Hydra, no keys, no values.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import yaml


def package_file(package: str, path: str) -> Path:
    """Where the file ``path`` of an installed package lies; the package is not imported.

    Raises:
        ValueError: there is no such package.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package:{package}/{path}: there is no installed package {package!r}")
    return Path(spec.submodule_search_locations[0]).absolute() / path


def checkout_file(path: str) -> Path:
    """Where the file ``path`` of the checkout lies that is installed here.

    Raises:
        ValueError: what is installed is a wheel, which brings no such files.
    """
    found = package_file("conf", "").parent / path.lstrip("/")
    if not found.is_file():
        raise ValueError(
            f"checkout:{path}: comes with a checkout of Pagemill only, and this installation is none; "
            "name a file of your own (pagemill run preset=smoke needs none)"
        )
    return found


def groups(name: str = "config") -> dict[str, str | None]:
    """Group -> the option that ``conf/<name>.yaml`` takes by default, in its order; None where it takes none."""
    entries = yaml.safe_load(text(f"{name}.yaml"))["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in package_file("conf", group).glob("*.yaml"))


def text(path: str) -> str:
    return package_file("conf", path).read_text(encoding="utf-8")

"""The settings of a run that was made, as its ``_run.json`` tells them, and the same with overrides over them.

Knows which settings a rerun may change; it reads records and runs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from jobs._app import compose
from jobs._schema import RunConfig, from_json
from pipeline import Limits, MetricsOptions
from pipeline.archive import Archive
from pipeline.records import RUN

# What names the rows and shapes the files: another value would be another run.
_FIXED = ("input", "output", "job", "name", "limit", "resume", "preset")
# How far one run may go and where its metrics are read was that run's own affair.
_ITS_OWN = {**asdict(Limits()), "metrics": asdict(MetricsOptions())}


def without_limits(overrides: list[str]) -> list[str]:
    """``overrides`` less those that say how far this one run may go and where its metrics are read."""
    return [override for override in overrides if _key(override).partition(".")[0] not in _ITS_OWN]


def recorded(archive: Archive, *, rerun: str = "") -> RunConfig:
    """The run's configuration, or that of its rerun in the folder of this name.

    Raises:
        ValueError: the record is missing or damaged; the message names it.
    """
    folder = archive.folder / rerun
    config = Archive.open(folder).config if rerun else archive.config
    try:
        return from_json(RunConfig, {**config, **_ITS_OWN})
    except ValueError as error:
        raise ValueError(f"{folder / RUN}: damaged, or of another version: {error}") from error


def with_overrides(config: RunConfig, overrides: list[str]) -> RunConfig:
    """``config`` with what ``overrides`` ask for: a key's value, or a whole group's where they choose its option.

    Raises:
        ValueError: an override is refused; the message names the key.
    """
    named = {_key(override) for override in overrides}
    common = ["input.path=any.jsonl", f"seed={config.seed}"]
    default, asked = (asdict(compose("config", words, kind=RunConfig)) for words in (common, [*common, *overrides]))
    return from_json(RunConfig, _laid_over(asdict(config), default, asked, named=named))


def _key(override: str) -> str:
    key, separator, _ = override.lstrip("+").partition("=")
    if not separator or key.startswith("~"):
        raise ValueError(f"{override}: is no key=value")
    if key.partition(".")[0] in _FIXED:
        raise ValueError(f"{key}: a rerun answers rows of the same run into the same columns, so it cannot be changed")
    return key


def _laid_over(recorded: Any, default: Any, asked: Any, *, named: Collection[str], key: str = "") -> Any:
    """``recorded``, but ``asked`` for the ``named`` keys and for those that follow them, as engine.seed follows seed."""
    if key in named:
        return asked
    if isinstance(asked, Mapping) and "." not in key:
        return {
            name: _laid_over(recorded[name], default[name], asked[name], named=named, key=f"{key}.{name}".lstrip(".")) for name in asked
        }
    return recorded if asked == default else asked

"""Which keys a configuration has and of which type, and the typed values that it turns into.

The keys of a group are the fields of the class that uses them, so this file copies no key and no default.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf

from engine import EngineConfig, KVCacheConfig, ModelConfig, SamplingParams
from jobs import _conf
from pipeline import InputOptions, Limits, MetricsOptions, OutputOptions, PromptOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Which job: ``name`` is a module in ``jobs/``."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that one run is told; the keys of ``conf/config.yaml``."""

    model: ModelConfig
    engine: EngineConfig
    kv_cache: KVCacheConfig
    sampling: SamplingParams
    prompt: PromptOptions
    input: InputOptions
    output: OutputOptions
    job: JobOptions
    name: str
    seed: int
    limit: int | None = None
    resume: str = "auto"
    deadline: str | None = None
    max_rows: int | None = None
    max_tokens_total: int | None = None
    max_error_rate: float | None = None
    stall_seconds: float | None = 900.0
    progress: bool = True
    metrics: MetricsOptions = field(default_factory=MetricsOptions)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit: {self.limit} must be 1 or more, or null for all rows")
        if self.resume not in ("auto", "never", "force"):
            raise ValueError(f"resume: {self.resume!r} is not one of auto, never, force")
        _ = self.limits  # refuses what is out of range

    @property
    def limits(self) -> Limits:
        return Limits(**{item.name: getattr(self, item.name) for item in dataclasses.fields(Limits)})


def schema_of(source: type) -> Any:
    """``source``'s fields as an OmegaConf schema: nested, not frozen, with lists and dicts; ``???`` where a value must be given."""
    hints = get_type_hints(source)
    columns: list[Any] = []
    for item in dataclasses.fields(source):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind):
            inner = schema_of(kind)  # type: ignore[arg-type]
            columns.append((item.name, inner, field(default_factory=inner)))
        elif isinstance(item.default, tuple):
            columns.append((item.name, _plain(kind), field(default_factory=list)))
        elif item.default_factory is not dataclasses.MISSING:
            columns.append((item.name, _plain(kind), field(default_factory=_open_dict)))
        else:
            columns.append((item.name, _plain(kind), MISSING if item.default is dataclasses.MISSING else item.default))
    return dataclasses.make_dataclass(source.__name__, columns)


def typed(kind: type[T], config: DictConfig) -> T:
    """The checked ``config`` as a ``kind``: the inverse of ``schema_of``.

    Raises:
        ValueError: a value is out of range; the message names the key.
    """
    return cast(T, _build(kind, OmegaConf.to_container(config)))


def from_json(kind: type[T], values: Any) -> T:
    """A ``kind`` from what ``dataclasses.asdict`` and JSON made of it.

    Raises:
        ValueError: a key is unknown or a value is out of range.
    """
    try:
        return cast(T, _build(kind, values))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"these are not the settings of this version: {error}") from error


def as_yaml(config: Any) -> str:
    """A typed configuration as text, in the order of its classes."""
    return cast(str, yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True))


def absolute(path: str) -> str:
    """A path as it is recorded: relative to the start folder no more. URLs stay; ``package:conf/x.jsonl`` and ``checkout:data/x.jsonl``
    are looked up, and a ValueError says where they are not there."""
    if path.startswith("checkout:"):
        return str(_conf.checkout_file(path.removeprefix("checkout:")))
    if path.startswith("package:"):
        package, _, rest = path.removeprefix("package:").partition("/")
        return str(_conf.package_file(package, rest))
    return path if "://" in path else str(Path(path).expanduser().absolute())


def _open_dict() -> DictConfig:
    """A mapping's schema: empty, and not closed to new keys, which Hydra otherwise takes for misspelt ones."""
    return DictConfig({}, flags={"struct": False})


def _plain(kind: Any) -> Any:
    """The type as OmegaConf knows it: a list for a tuple, a dict for a mapping."""
    if get_origin(kind) is tuple:
        return list[get_args(kind)[0]]  # type: ignore[misc]
    if get_origin(kind) is Mapping:
        return dict[get_args(kind)]  # type: ignore[misc]
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(_plain(member) for member in get_args(kind))]  # noqa: UP007
    return kind


def _build(kind: Any, values: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{key: _build(hints[key], value) for key, value in values.items()})  # type: ignore[operator]
    return tuple(values) if isinstance(values, list) else values

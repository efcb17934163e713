"""Hydra, from the words of a command line to one checked configuration; its errors come out as one plain sentence.

Knows where conf/ lies and how Hydra fails; knows no key.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, GrammarParseError, OmegaConfBaseException, ValidationError

from jobs import _conf

_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # a ${ that no backslash takes the meaning from
_QUOTING = (
    "quote a text for Hydra and again for the shell, as in 'prompt.system=\"Be brief, please.\"', "
    "or keep it in a file: prompt.system_file=FILE, prompt.template_file=FILE"
)


def read_config(name: str, overrides: list[str], *, schema: type) -> DictConfig:
    """Compose ``conf/<name>.yaml`` with ``overrides`` into a configuration of exactly the keys and types of ``schema``.

    Raises:
        ValueError: a key is unknown or missing, a value has the wrong type, an option does not exist, an override is
            not in Hydra's grammar; the message names the key.
    """
    for override in overrides:
        if re.match(r"[+~]*hydra\b", override) and not override.startswith("hydra.searchpath="):
            raise ValueError(f"{override}: Hydra's own settings are not taken; only hydra.searchpath=[FOLDER] is, for options of your own")
    OmegaConf.register_new_resolver("stem", _stem, replace=True)
    ConfigStore.instance().store(name=f"base_{name}", node=schema)  # the first entry of conf/<name>.yaml's defaults
    try:
        with initialize_config_dir(config_dir=str(_conf.package_file("conf", "")), version_base="1.3"):
            loose = compose(name, overrides=overrides)
        # A "+key=value" gets past Hydra's check, so the result is laid onto the schema once more.
        config = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.to_container(loose, resolve=False))
        for key in _missing(OmegaConf.to_container(config, resolve=False)):
            raise ValueError(f"{key}: there is no value; write {key}=... (pagemill run --help says what goes there)")
        assert isinstance(config, DictConfig)
        _refuse_interpolated_prompt(config)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(_sentence(error)) from error
    return config


def points(overrides: list[str]) -> list[tuple[list[str], list[str]]]:
    """The runs of a sweep: the words that all of them share, and each one's own, for every combination of the values.

    Raises:
        ValueError: an override is not in Hydra's grammar, or a prompt has a comma that would make two of it.
    """
    shared, choices = [], []
    for word in overrides:
        try:
            override = OverridesParser.create().parse_override(word)
            if not override.is_sweep_override():
                shared.append(word)
                continue
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        except HydraException as error:
            raise ValueError(f"{word}: Hydra cannot read this; {_QUOTING}") from error
        if word.lstrip("+").startswith("prompt."):
            raise ValueError(f"{override.get_key_element()}: a prompt is not swept over; {_QUOTING}")
    return [(shared, list(values)) for values in itertools.product(*choices)]


def _stem(path: str) -> str:
    """A folder name from an input path: ``/data/questions [v1].jsonl.gz`` gives ``questions_v1``."""
    name = Path(path.rstrip("/")).name.split(".")[0]
    return re.sub(r"\W+", "_", name).strip("_")[:80] or "run"


def _missing(values: Any, at: str = "") -> Iterator[str]:
    """The keys that still hold ``???``. OmegaConf's own list fails on an interpolation of one of them."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _missing(value, f"{at}.{key}" if at else str(key))
    elif values == MISSING:
        yield at


def _refuse_interpolated_prompt(config: DictConfig) -> None:
    """A prompt with ``${...}`` in it would silently become another text, so it is refused while that can be seen."""
    as_written = OmegaConf.to_container(config, resolve=False)
    assert isinstance(as_written, dict)
    for key, text in as_written.get("prompt", {}).items():
        if isinstance(text, str) and _INTERPOLATION.search(text):
            raise ValueError(
                f"prompt.{key}: holds ${{...}}, which the configuration would replace; put the text into a file "
                f"(prompt.system_file, prompt.template_file) or write \\${{...}}"
            )


def _sentence(error: Exception) -> str:
    """What was wrong and what to do, from the innermost error that names a key."""
    cause = error
    if isinstance(error, ConfigCompositionException):
        cause = next((inner for inner in (error.__cause__, error.__context__) if isinstance(inner, OmegaConfBaseException)), error)
    if isinstance(cause, OverrideParseException):
        return f"{cause.override}: Hydra cannot read this; {_QUOTING}"
    if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
        group, _, option = cause.missing_cfg_file.rpartition("/")
        options = [name for name in cause.options or _conf.options(group) if not name.startswith("base_")]
        return f"{group}: there is no {option!r}; choose one of {', '.join(options)}"
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
        return _unknown_key(cause)
    if isinstance(cause, GrammarParseError):
        return f"{cause.full_key}: holds an open ${{ ; put the text into a file or write \\${{"
    if isinstance(cause, yaml.YAMLError):
        return " ".join(str(cause).split())
    first_line = str(cause).splitlines()[0]
    if isinstance(cause, ValidationError) and first_line.endswith("is not Optional"):
        return f"{cause.full_key}: may not be null; leave it out for its default"
    if isinstance(cause, ValidationError) and "is not a ListConfig" in first_line:
        return f"{cause.full_key}: takes a list; write {_list_of_one(str(cause.full_key), cause.value)}"
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key}: {first_line[0].lower()}{first_line[1:]}"
    ambiguous = re.match(r"Ambiguous value for argument '(.*)'$", first_line)
    return f"{ambiguous[1]}: a comma asks for several runs, which are started with -m; {_QUOTING}" if ambiguous else first_line


def _list_of_one(key: str, value: Any) -> str:
    """The word that gives ``key`` a list with nothing but ``value`` in it, quoted for Hydra and for the shell."""
    item = str(value) if isinstance(value, (int, float)) else QuotedString(str(value), Quote.double).with_quotes()
    return shlex.quote(f"{key}=[{item}]")


def _unknown_key(error: ConfigAttributeError | ConfigKeyError) -> str:
    group, _, key = str(error.full_key).rpartition(".")
    known = [field.name for field in fields(error.object_type)] if error.object_type is not None else []
    near = difflib.get_close_matches(key, known, n=1)
    guess = f", did you mean {near[0]}?" if near else ""
    return f"{error.full_key}: unknown key{guess} ({group or 'the top level'} has {', '.join(known)})"

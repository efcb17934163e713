"""What --help prints: the folders, files and comments of conf/, so that it cannot drift from the configuration.

Loads no Hydra and no torch: help is there at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from jobs import _conf

_EXAMPLES = """\
examples
  pagemill run input.path=questions.jsonl
  pagemill run input=parquet input.path=questions.parquet 'prompt.template="{{ question }}"' output.path=answers
  pagemill run input.path=questions.jsonl sampling=greedy sampling.max_tokens=64 limit=100
"""


def overview(verbs: Mapping[str, str]) -> str:
    """The verbs, the groups with their options (the default first), and examples."""
    commands = "\n".join(f"  pagemill {verb:<7}{text}" for verb, text in verbs.items())
    groups = "\n".join(f"  {group:<10}{', '.join(_default_first(group, default))}" for group, default in _conf.groups().items())
    return (
        "Pagemill: a file of prompts in, Arrow files of answers out.\n\n"
        f"usage: pagemill [{' | '.join(verbs)}] [group=option] [group.key=value] ...\n\n"
        f"commands\n{commands}\n\n"
        f"groups and their options (the keys: pagemill run --help)\n{groups}\n\n"
        f"{_EXAMPLES}\n"
        "-m runs every combination of values that commas part; --cfg job prints the configuration and stops; --version; -h, --help"
    )


def keys(verb: str, *, what: str) -> str:
    """What ``verb`` does, and every key that it takes with its default and its comment: the text of each group's default file."""
    own = [] if verb == "run" else [_indented(f"{verb}.yaml")]
    name = "bench" if verb == "bench" else "config"  # plan takes all that run takes
    parts = [f"pagemill {verb}: {what}\n", *([_EXAMPLES] if verb == "run" else []), *own]
    if name == "config":
        parts.append(_indented("config.yaml"))
    for group, default in _conf.groups(name).items():
        if default is not None:
            others = [option for option in _conf.options(group) if option != default]
            parts.append(f"{group}={default}" + (f"   (or {', '.join(others)})" if others else ""))
            parts.append(_indented(f"{group}/{default}.yaml"))
    return "\n".join(parts).rstrip()


def _default_first(group: str, default: str | None) -> list[str]:
    return sorted(_conf.options(group), key=lambda option: option != default)


def _indented(path: str) -> str:
    return "".join(f"  {line}" for line in _conf.text(path).splitlines(keepends=True))

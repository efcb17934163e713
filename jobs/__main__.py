"""The `pagemill` command line: picks the verb and hands it the overrides.

Imports only what the verb needs, so that --help answers at once; knows nothing of configuration keys.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys

from jobs._signals import leave_at_once
from jobs._terminal import say, tell

VERBS = {
    "run": "answer the rows of input.path into Arrow files in output.path (the verb when none is given)",
    "plan": "what a run would come to: rows, exact tokens, memory, rows that do not fit; loads no weights",
    "verify": "check the answers in a folder: checksums, rows, and with rows=N the answers of N rows again",
    "rerun": "answer some rows of a finished run again, under other settings, and put them in their places",
    "bench": "measure speed and memory on this machine, for every combination of settings: JSON lines and a table",
}
# These read a folder instead of a configuration, and each has an argument parser of its own.
_OF_A_FOLDER = {"verify": "jobs.verify", "rerun": "jobs.rerun"}
_HOME = {"run": "jobs._app", "plan": "jobs.plan", "bench": "jobs.bench"}
_SWEEP = {"run": "jobs._sweep", "bench": "jobs.bench"}  # -m; bench sweeps without it too


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code of the contract (0, 2, 3, 4, 75 or 1)."""
    leave_at_once()
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _OF_A_FOLDER:
        return int(importlib.import_module(_OF_A_FOLDER[argv[0]]).main(argv[1:]))
    options = _parser().parse_intermixed_args(argv)
    words = options.words
    named = bool(words) and "=" not in words[0] and not words[0].startswith(("~", "+"))
    if named and words[0] not in VERBS:
        say(f"there is no command {words[0]!r}; the commands are {', '.join(VERBS)}")
        return 2
    if options.help or not (words or options.cfg):
        from jobs import _help

        tell(_help.keys(words[0], what=VERBS[words[0]]) if named else _help.overview(VERBS))
        return 0
    verb = words[0] if named else "run"
    if options.multirun and verb not in _SWEEP:
        say(f"-m: only {' and '.join(_SWEEP)} sweep over values, not {verb}")
        return 2
    home = importlib.import_module((_SWEEP if options.multirun else _HOME)[verb])
    code: int = home.main(words[1:] if named else words, show=options.cfg is not None)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagemill", add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--version", action="version", version=importlib.metadata.version("pagemill"))
    return parser


if __name__ == "__main__":
    sys.exit(main())

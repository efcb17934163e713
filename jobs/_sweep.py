"""`pagemill run -m`: several runs one after the other, each with its own values and its own output folder.

Knows which runs there are and when to stop; what a run does is `_app`'s.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from jobs import _app
from jobs._app import OK, ROWS_FAILED, guarded, read_run
from jobs._compose import points
from jobs._schema import RunConfig, as_yaml
from jobs._terminal import say, tell


def main(overrides: list[str], *, show: bool) -> int:
    """Run every combination of the values that commas part; the first run that does not come to its end ends the sweep.

    Returns that run's exit code, else 3 where a row failed in one of them, else 0.
    """
    return guarded(lambda: _show(overrides) if show else _sweep(overrides))


def _sweep(overrides: list[str]) -> int:
    runs = _runs(overrides)
    code = OK
    for number, (words, config) in enumerate(runs, start=1):
        say(f"run {number} of {len(runs)}: {' '.join(words)}")
        ended = guarded(partial(_app.run_once, config))
        if ended not in (OK, ROWS_FAILED):
            return ended
        code = max(code, ended)
    return code


def _show(overrides: list[str]) -> int:
    tell("---\n".join(as_yaml(config) for _, config in _runs(overrides)))
    return OK


def _runs(overrides: list[str]) -> list[tuple[list[str], RunConfig]]:
    """The runs with the values that are theirs alone.

    Raises:
        ValueError: two runs would share an output folder, or a prompt is among the values.
    """
    runs = [(values, read_run([*words, *values])) for words, values in points(overrides)]
    for path, count in Counter(config.output.path for _, config in runs).items():
        if count > 1:
            raise ValueError(
                f"output.path: {count} of {len(runs)} runs would share {path}; name the folder by what differs, "
                "for example 'output.path=outputs/t${sampling.temperature}'"
            )
    return runs

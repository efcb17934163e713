"""What the commands print: results on stdout, words on stderr.

Loads nothing and knows no command; a reader that goes away changes no exit code.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def tell(text: str) -> None:
    """Print a command's result. Where stdout cannot be written (a full disk, a reader that went away) stderr says so."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # whoever reads with head has what it wants
            say(f"stdout cannot be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails over it once more at the end


def say(line: str) -> None:
    """Tell the user something in one line."""
    with suppress(OSError):  # nobody listens
        print(f"pagemill: {line}", file=sys.stderr, flush=True)

"""What is done and what is left in one output folder, and for which settings.

Knows no rows and no engine: it maps shards to parts and keeps the run's record beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Resume = Literal["auto", "never", "force"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the answers come from, as JSON values that the job fills in.

    ``config`` is the whole resolved configuration and ``versions`` the libraries', both for the record only.
    ``fingerprint`` holds what changes answers: another one does not go into the same folder.
    """

    config: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    versions: Mapping[str, str]

"""What a run did, told to whoever started it.

Knows parts as their lines in the manifest; it counts nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.failures import Failures
from pipeline.ledger import Ledger
from pipeline.limits import Reason
from pipeline.report import Metrics, write_metrics
from pipeline.types import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run did. Rows are output rows, those of earlier runs in the same folder included.

    They answer ``num_asked`` input rows. ``num_resumed`` input rows were answered already, ``num_done`` by this run; ``num_cut``
    answers hit a length limit. This run took up ``num_taken`` input rows, of which ``failures`` are error rows, by error code, the
    commonest first, whether their part is finished or not. ``stopped`` is what ended the run early; where it is None nothing is
    left, else ``num_waiting`` input rows are answered and kept, and wait for the rest of their part, and ``num_unanswered`` are
    for the next run. ``parts`` is a glob for the files that the answers are in, ``metrics`` the content of metrics.json.
    """

    output_path: str
    parts: str
    num_asked: int
    num_rows: int
    num_ok: int
    num_errors: int
    num_cut: int
    num_resumed: int
    num_done: int
    num_taken: int
    failures: Mapping[str, Failures]
    num_waiting: int
    num_unanswered: int
    stopped: Reason | None
    metrics: Mapping[str, Any]


def summarise(parts: Sequence[Part], *, ledger: Ledger, metrics: Metrics, suffix: str, stopped: Reason | None) -> Summary:
    """What became of ``parts``; writes metrics.json."""
    finished = [ledger.finished[part.index] for part in parts if part.index in ledger.finished]
    num_rows = sum(part.rows for part in finished)
    num_errors = sum(part.errors for part in finished)
    numbers = metrics.summary(rows_ok=num_rows - num_errors, rows_error=num_errors)
    if metrics.rows_done or not (ledger.folder.path / "metrics.json").exists():  # a run with nothing to do leaves the last one's figures
        write_metrics(ledger.folder.path, numbers)
    ledger.folder.deliver(["metrics.json"])
    num_asked = sum(part.shard.num_rows for part in parts if part.index in ledger.finished)
    num_answered = metrics.rows_resumed + metrics.rows_done
    return Summary(
        output_path=ledger.folder.name,
        parts=f"{ledger.folder.name}/part-*{suffix}",
        num_asked=num_asked,
        num_rows=num_rows,
        num_ok=num_rows - num_errors,
        num_errors=num_errors,
        num_cut=sum(part.cut for part in finished),
        num_resumed=metrics.rows_resumed,
        num_done=metrics.rows_done,
        num_taken=metrics.rows_taken,
        failures=metrics.failures.by_code(),
        num_waiting=num_answered - num_asked,
        num_unanswered=metrics.rows_total - num_answered,
        stopped=stopped,
        metrics=numbers,
    )

"""When a run ends before its rows do: at a clock time, after so many rows or tokens, at too many failures, on a signal.

Knows rows and tokens as counts only; the runner asks before each row and between steps, and ends the run as it is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from engine import Request
from pipeline.report import Metrics

Reason = Literal["deadline", "max_rows", "max_tokens_total", "max_error_rate", "signal"]

# Failures count from so many rows on: one bad row among the first three says nothing.
_LEAST_ROWS = 100
_DURATION = re.compile(r"(?:(\d+)d)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:(\d+)s)?")


class Stopped(Exception):
    """The run ends here, early and in order.

    Attributes:
        reason: the limit that ended it.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run may use; None is no limit.

    ``deadline`` is a clock time ("06:30", the next one), a date with a time ("2026-03-01T06:30") or a duration ("2h30m").
    ``max_rows`` rows go to the engine at most; ``max_tokens_total`` bounds the tokens of prompts and answers, and is never
    passed. ``max_error_rate`` ends the run when a larger share of the rows that it took up has failed, from 100 rows on.
    ``stall_seconds`` without a finished step are a hang.
    """

    deadline: str | None = None
    max_rows: int | None = None
    max_tokens_total: int | None = None
    max_error_rate: float | None = None
    stall_seconds: float | None = 900.0

    def __post_init__(self) -> None:
        for key in ("max_rows", "max_tokens_total"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}: {value} must be 1 or more, or null for no limit")
        if self.max_error_rate is not None and not 0.0 <= self.max_error_rate <= 1.0:
            raise ValueError(f"max_error_rate: {self.max_error_rate} is not a share in [0, 1], such as 0.05")
        if self.stall_seconds is not None and not self.stall_seconds > 0:
            raise ValueError(f"stall_seconds: {self.stall_seconds} must be over 0, or null to wait for ever")
        if self.deadline is not None:
            parse_deadline(self.deadline, now=datetime.now().astimezone())

    @property
    def is_dated(self) -> bool:
        """Whether the deadline is one moment, so that it does not come again."""
        return self.deadline is not None and "-" in self.deadline


NO_LIMITS = Limits()


class Gate:
    """How much of its limits a run has used, and so whether it goes on.

    Attributes:
        stopped: the limit that keeps further rows out, None as long as none does.
    """

    def __init__(self, limits: Limits, *, metrics: Metrics, stop: Callable[[], bool]) -> None:
        """The deadline counts from here; ``stop`` is true once a signal asked for the end."""
        self.stopped: Reason | None = None
        self._limits = limits
        self._metrics = metrics
        self._stop = stop
        self._num_reserved = 0  # tokens that the rows in flight may still use
        self._deadline = None if limits.deadline is None else parse_deadline(limits.deadline, now=datetime.now().astimezone())

    def check(self) -> None:
        """Raises Stopped where the run has to end now, whatever is in flight."""
        if self._stop():
            raise Stopped("signal")
        if self._deadline is not None and datetime.now().astimezone() >= self._deadline:
            raise Stopped("deadline")
        rate, taken = self._limits.max_error_rate, self._metrics.rows_taken
        if rate is not None and taken >= _LEAST_ROWS and self._metrics.failures.num_rows > rate * taken:
            raise Stopped("max_error_rate")

    def admits(self, request: Request, *, num_in_flight: int) -> bool:
        """Whether ``request`` may go to the engine now; where not, ask again when a row has finished, unless ``stopped`` says why not.

        Rows in flight are never cut off here: a row that would not be done by the deadline, or might pass a budget, waits until
        the others are done, and only then is it known not to fit.
        """
        limits = self._limits
        if limits.max_rows is not None and self._metrics.rows_asked >= limits.max_rows:
            self.stopped = "max_rows"
        elif self._is_too_late(num_in_flight):
            self.stopped = None if num_in_flight else "deadline"
        elif limits.max_tokens_total is not None and self._num_used + _most_tokens(request) > limits.max_tokens_total:
            self.stopped = None if num_in_flight else "max_tokens_total"
        else:
            self._num_reserved += _most_tokens(request)
            return True
        return False

    def settled(self, request: Request) -> None:
        """A row that was admitted is done, and its tokens are in the metrics."""
        self._num_reserved -= _most_tokens(request)

    @property
    def _num_used(self) -> int:
        return self._metrics.prompt_tokens + self._metrics.generated_tokens + self._num_reserved

    def _is_too_late(self, num_in_flight: int) -> bool:
        """Whether one more row, behind those in flight, would be done after the deadline at the speed so far."""
        num_done = self._metrics.rows_asked - num_in_flight
        if self._deadline is None or num_done == 0:
            return False
        seconds_a_row = self._metrics.run_seconds / num_done
        return datetime.now().astimezone() + timedelta(seconds=seconds_a_row * (num_in_flight + 1)) > self._deadline


def parse_deadline(text: str, *, now: datetime) -> datetime:
    """The moment that ``text`` names; times without a zone are ``now``'s.

    Raises:
        ValueError: it is none of the three forms, or over.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is not None and any(match.groups()):
        days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
        try:
            return now + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        except OverflowError:
            raise ValueError(f"deadline: {text} is too far away; write null for none") from None
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text.strip()):
            clock = datetime.strptime(text.strip(), "%H:%M:%S" if text.count(":") == 2 else "%H:%M")
            moment = now.replace(hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0)
            return moment if moment > now else moment + timedelta(days=1)
        moment = datetime.fromisoformat(text.strip())
        moment = moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo)
    except ValueError:
        raise ValueError(
            f'deadline: {text!r} is no time; write a clock time ("06:30"), a date with a time ("2026-03-01T06:30") or a duration ("2h30m")'
        ) from None
    if moment <= now:
        raise ValueError(f"deadline: {text} is over; write a later one, or null for none")
    return moment


def _most_tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + request.sampling.n * request.sampling.max_tokens

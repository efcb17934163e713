"""What came back: when each row was answered, and how likely the model found the tokens that were scored.

Counts completions as they come; who makes them is not known here.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from engine import Completion


class Answers:
    """Seconds are from the run's start."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._scores: list[float] = []

    def add(self, completion: Completion, *, seconds: float) -> None:
        """Raises ValueError for a row that failed."""
        if completion.finish_reason == "error":
            raise ValueError(f"row {completion.request_id}: {completion.error_message}")
        self._seconds.append(seconds)
        self._scores += completion.prompt_logprobs or ()

    @property
    def first_s(self) -> float:
        return self._seconds[0]

    def numbers(self) -> dict[str, Any]:
        """``answer_s_median``: after so long half of the answers were there. ``perplexity``: exp of the mean of -log probability over
        all scored tokens of all rows, None where no row asks for scores (job=score, or ``sampling.prompt_logprobs``)."""
        num_scored = len(self._scores)
        return {
            "answer_s_median": statistics.median(self._seconds),
            "scored_tokens": num_scored,
            "perplexity": math.exp(-math.fsum(self._scores) / num_scored) if num_scored else None,
        }

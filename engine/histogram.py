"""How many values lie where, in bounded memory: enough for a mean and for quantiles that are right within one percent.

Knows numbers only; what they measure is its owner's business.
"""

from __future__ import annotations

import math

_GROWTH = 1.02  # of a bin's upper edge over its lower one, so that its middle is within 1 % of all in it
_LOG_GROWTH = math.log(_GROWTH)
_SMALLEST, _LARGEST = 1e-6, 1e7
_NUM_BINS = math.ceil(math.log(_LARGEST / _SMALLEST) / _LOG_GROWTH) + 1


class Histogram:
    """Positive values in bins of equal ratio, as in DDSketch (Masson, Rim, Lee 2019); those out of 1e-6..1e7 count in the outer bins."""

    __slots__ = ("_counts", "_high", "_low", "num_values", "total")

    def __init__(self) -> None:
        self.num_values = 0
        self.total = 0.0
        self._counts = [0] * _NUM_BINS
        self._low, self._high = math.inf, -math.inf

    def add(self, value: float) -> None:
        bounded = min(max(value, _SMALLEST), _LARGEST)
        self._counts[int(math.log(bounded / _SMALLEST) / _LOG_GROWTH)] += 1
        self.num_values += 1
        self.total += value
        self._low, self._high = min(self._low, value), max(self._high, value)

    @property
    def mean(self) -> float | None:
        """None where there is no value."""
        return self.total / self.num_values if self.num_values else None

    def quantile(self, share: float) -> float | None:
        """The value of rank ``ceil(share x number of values)``, within 1 %; None where there is no value."""
        if not self.num_values:
            return None
        rank, num_below = max(1, math.ceil(share * self.num_values)), 0
        for place, count in enumerate(self._counts):
            num_below += count
            if num_below >= rank:
                return min(max(_SMALLEST * math.pow(_GROWTH, place + 0.5), self._low), self._high)
        raise AssertionError("every value is in a bin")

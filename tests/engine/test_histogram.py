"""The histogram against a sorted list of all values."""

import math

import pytest
from hypothesis import given, strategies as st

from engine.histogram import Histogram

SECONDS = st.floats(1e-6, 9e6)


@given(st.lists(SECONDS, min_size=1, max_size=200), st.sampled_from([0.0, 0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_within_one_percent(values, share):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.quantile(share) == pytest.approx(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], rel=0.0101)
    assert histogram.mean == pytest.approx(math.fsum(values) / len(values))
    assert histogram.num_values == len(values)


def test_one_value_is_every_quantile_and_none_is_none():
    histogram = Histogram()
    assert histogram.mean is histogram.quantile(0.5) is None
    histogram.add(0.125)
    assert histogram.quantile(0.5) == histogram.quantile(0.99) == histogram.mean == 0.125


@given(st.lists(st.sampled_from([-1.0, 0.0, 1e-9, 1e7, 1e12]), min_size=1))
def test_values_out_of_range_count_and_stay_within_what_was_seen(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.num_values == len(values)
    assert min(values) <= histogram.quantile(0.5) <= max(values)

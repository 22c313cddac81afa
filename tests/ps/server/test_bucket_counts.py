from __future__ import annotations

import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.ps.server.metrics import SECONDS_BUCKETS, BucketCounts


@given(
    bounds=st.lists(st.floats(-10, 10), unique=True, max_size=6).map(sorted),
    values=st.lists(st.floats(-12, 12), max_size=30),
)
def test_a_bucket_holds_what_is_not_above_its_bound(
    bounds: list[float], values: list[float]
) -> None:
    counts = BucketCounts(bounds)
    for value in values:
        counts.observe(value)
    assert counts.sum == pytest.approx(sum(values))
    expected = {repr(bound): sum(v <= bound for v in values) for bound in bounds}
    assert counts.cumulative == expected | {"+Inf": len(values)}


def test_counting_is_cheap() -> None:
    counts = BucketCounts(SECONDS_BUCKETS)
    best = min(timeit.repeat(lambda: counts.observe(0.01), number=10_000, repeat=20)) / 10_000
    assert best < 2e-6

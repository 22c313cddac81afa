"""What tasks count for Prometheus: plain numbers, which its client reads when somebody scrapes.

Whoever counts is a collector of `prometheus_client`: its `collect` yields families of metrics. The
client's own histograms take 1.5 microseconds a value, and it takes 20 ms to import, which only a
job that is scraped pays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SECONDS_BUCKETS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0),
)
"""Upper bounds for durations, from 10 microseconds to 50 seconds."""


class BucketCounts:
    """Counts of values by bucket, for one thread that counts and any that read.

    The bounds are the inclusive upper ones, ascending; a last bucket without one is added. `sum`
    is the sum of the values.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Adds a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> dict[str, float]:
        """How many values are at most each bound, by the bound as Prometheus writes it."""
        bounds = [*map(repr, self._bounds), "+Inf"]
        return dict(zip(bounds, accumulate(self._counts), strict=True))

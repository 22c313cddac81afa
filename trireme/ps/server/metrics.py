"""The metrics of one server, for the coordinator and for Prometheus.

They are read from the shard between two messages: the shard itself reads no clock.
"""

from __future__ import annotations

import heapq
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import psutil

from trireme.ps.replication.log import ReplicationLog
from trireme.ps.server.replication_metrics import ReplicationMetrics
from trireme.ps.shard.shard import Shard

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_log = logging.getLogger(__name__)

_SECONDS = 0.5
_MOST_LAGS = 32
"""So many workers are in a status with how far they are behind, those furthest behind: a record of
each server has them, and all of a thousand are 30 kB in each of ten thousand records."""

_VERDICTS = ("applied", "stale", "duplicate", "fenced", "rejected")
_GAUGES = {
    "global_step": "The global step of the values",
    "memory_bytes": "Resident memory of the process",
    "withheld_answers": "Workers whose answer waits",
}
_NAMES = 8

Report = Callable[[Mapping[str, float | str]], object]
"""Takes a status report: values by name."""


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


class ShardMetrics:
    """Measures one shard: the updates that it applies, and the workers that wait for an answer."""

    def __init__(self, server: int = 0) -> None:
        self.replication = ReplicationMetrics(server)  # measures the replicas of the server
        self.report: Report = lambda status: None  # takes a status report every half second
        self._process = psutil.Process()
        self._due = 0.0
        self._seconds = 0.0  # spent in applying, and how often, since the last report
        self._times = 0
        self._told: dict[str, float | str] = {}
        self._histogram = BucketCounts(SECONDS_BUCKETS)
        self._counters: Mapping[str, int] = {}
        self._gauges = {"global_step": 0, "memory_bytes": 0, "withheld_answers": 0}
        self._lags: Mapping[int, int] = {}  # of every worker that has ever been there

    def applied(self, seconds: float) -> None:
        """Records how long it took to apply the updates of a step."""
        self._seconds += seconds
        self._times += 1
        self._histogram.observe(seconds)

    def look(self, now: float, shard: Shard, logs: Iterable[ReplicationLog[Any]] = ()) -> None:
        """Reports the server's status, if a report is due.

        Args:
            logs: the logs of the shards that the server is primary of.
        """
        if now < self._due:
            return
        self._due = now + _SECONDS
        self.report(self.status(now, shard, logs))

    def status(
        self, now: float, shard: Shard, logs: Iterable[ReplicationLog[Any]] = ()
    ) -> dict[str, float | str]:
        """Returns the server's status, and notes the metrics; see `look`."""
        waits, lags, memory = shard.waits(now), shard.lags(), self._process.memory_info().rss
        self._counters, self._lags = dict(shard.state.counters), {**self._lags, **lags}
        self._gauges = {
            "global_step": shard.state.step,
            "memory_bytes": memory,
            "withheld_answers": len(waits),
        }
        status: dict[str, float | str] = {
            "state": "serving" if shard.state.loaded else "waiting for the first values",
            "global_step": shard.state.step,
            "applied": shard.state.counters["applied"],
            "stale": shard.state.counters["stale"],
            "fenced": shard.state.counters["fenced"],
            "apply_seconds": self._seconds / max(self._times, 1),
            "memory_bytes": memory,
            **self.replication.status(now, logs),
        }
        if shard.state.extension is not None:
            status |= shard.state.extension.status()
        if waits:
            workers, longest = sorted(wait.worker for wait in waits)[:_NAMES], waits[0].notice
            status |= {
                "waiting": ", ".join(f"worker:{worker}" for worker in workers),
                "waiting_for": ", ".join(longest.names[:_NAMES]),
                "waiting_reason": longest.reason,
                "waiting_seconds": longest.seconds,
            }
        furthest = heapq.nlargest(_MOST_LAGS, lags.items(), key=lambda each: (each[1], -each[0]))
        status |= {f"lag/worker:{worker}": lag for worker, lag in sorted(furthest)}
        self._seconds, self._times = 0.0, 0
        # A reported value stays until another is reported: what is over is reported as empty.
        over = {name: "" if isinstance(told, str) else 0.0 for name, told in self._told.items()}
        self._told = status
        return {name: told for name, told in over.items() if name not in status} | status

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics for Prometheus, as they were at the last report."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        text, applied = "How long it took to apply the updates of a step", self._histogram
        buckets = [*applied.cumulative.items()]
        yield HistogramMetricFamily("trireme_apply_seconds", text, buckets, applied.sum)
        text, counters = "The sum of the staleness of the pushes applied", self._counters
        staleness = counters.get("staleness", 0)
        yield CounterMetricFamily("trireme_push_staleness_total", text, staleness)
        pushes = CounterMetricFamily(
            "trireme_pushes_total", "Pushes by verdict", labels=["verdict"]
        )
        for verdict in _VERDICTS:
            pushes.add_metric([verdict], counters.get(verdict, 0))
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"trireme_{name}", _GAUGES[name], value)
        text = "Pushes behind the worker that is furthest"
        lag = GaugeMetricFamily("trireme_worker_lag", text, labels=["worker"])
        for worker, behind in self._lags.items():
            lag.add_metric([str(worker)], behind)
        yield from (pushes, lag, *self.replication.collect())

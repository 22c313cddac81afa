"""The durations of a worker's steps by phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from trireme.metrics import SECONDS_BUCKETS, BucketCounts

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SERVED = ("data", "compute", "push", "wait")
"""The phases with parameter servers or other processes: waiting for a batch; forward and backward;
sending; waiting for the answer with the values."""

ALONE = ("data", "compute", "apply")
"""The phases of a lone process, which applies its updates itself."""

PhaseObserver = Callable[[str, float, float], object]
"""Called with a phase, and when it began and ended, on `time.monotonic`."""


class Phases:
    """Sums and histograms of the phases of one worker's steps.

    Added phases are counted at `settle`, or when the totals are read: counting many at once is
    cheaper than one by one, which matters where a step takes a millisecond.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._waiting: list[tuple[str, float, float]] = []
        self._observer: PhaseObserver | None = None
        self._histograms = {name: BucketCounts(SECONDS_BUCKETS) for name in names}
        self.add = self._waiting.append  # a phase of a step, with two readings of the clock

    @property
    def totals(self) -> dict[str, float]:
        """The seconds spent so far, by phase."""
        self.settle()
        return {name: histogram.sum for name, histogram in self._histograms.items()}

    def observe(self, observer: PhaseObserver | None) -> None:
        """Sets the observer of the phases that are added from now on; None for no observer."""
        self.settle()
        self._observer = observer

    def settle(self) -> None:
        waiting = self._waiting[:]
        durations: dict[str, list[float]] = {name: [] for name in self._histograms}
        for phase, began, ended in waiting:
            durations[phase].append(ended - began)
            if self._observer is not None:
                self._observer(phase, began, ended)
        del self._waiting[: len(waiting)]
        for phase, seconds in durations.items():
            self._histograms[phase].observe_all(seconds)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        text = "Seconds by phase of a step"
        family = HistogramMetricFamily("trireme_phase_seconds", text, labels=["phase"])
        for name, histogram in self._histograms.items():
            family.add_metric([name], [*histogram.cumulative.items()], histogram.sum)
        yield family

"""Counters, gauges and histograms, cheap enough for every layer.

Names follow Prometheus' conventions (https://prometheus.io/docs/practices/naming): they begin with
`trireme_`, give the base unit (`_seconds`, `_bytes`), and those of counters end in `_total`.

    pushes = registry.counter("trireme_pushes_total", "Pushes answered.", verdict="applied")
    pushes.increment()                                   # on the hot path

Request a metric from the registry once and keep it. Each metric has one writer: two threads that
count the same thing use different labels. Any thread may read.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

SECONDS_BUCKETS = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0),
)
"""Upper bounds for durations, from 10 microseconds to 50 seconds."""

COUNT_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0)
"""Upper bounds for small counts, such as the staleness of a push."""

_NAME = re.compile(r"trireme(_[a-z0-9]+)+")


class Sample(NamedTuple):
    """One number of a metric: its name with its suffix, its labels, its value."""

    name: str
    labels: dict[str, str]
    value: float


class _Number:
    """A metric of one value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def samples(self) -> list[Sample]:
        """Returns the value; its name and labels are those of the metric."""
        return [Sample("", {}, self.value)]


class Counter(_Number):
    """A value that only grows."""

    __slots__ = ()

    def increment(self, amount: float = 1) -> None:
        """Adds `amount`, which must not be negative (and is not checked, for speed)."""
        self.value += amount


class Gauge(_Number):
    """A value that goes up and down. Assign to `value`."""

    __slots__ = ()


class Histogram:
    """Counts of values by range.

    Args:
        bounds: the inclusive upper bounds of the ranges, ascending. A last range without a bound
            is added.
    """

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(map(float, bounds))
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Adds one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Adds several values."""
        counts, bounds = self._counts, self.bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values)

    @property
    def value(self) -> float:
        """The number of values."""
        return sum(self._counts)

    def samples(self) -> list[Sample]:
        """Returns the values by suffix of the name; those of ranges are cumulative."""
        totals = list(accumulate(self._counts))
        limits = [*map(repr, self.bounds), "+Inf"]
        ranges = zip(limits, totals, strict=True)
        return [
            *(Sample("_bucket", {"le": limit}, total) for limit, total in ranges),
            Sample("_sum", {}, self.sum),
            Sample("_count", {}, totals[-1]),
        ]


Metric = Counter | Gauge | Histogram
_Labels = tuple[tuple[str, str], ...]
_M = TypeVar("_M", Counter, Gauge, Histogram)


@dataclass
class Family:
    """All metrics of one name: one for each combination of label values.

    Attributes:
        name: the name.
        kind: `counter`, `gauge` or `histogram`.
        help: the help text.
        labels: the names of the labels, sorted.
        bounds: the bounds of histograms; None for other kinds.
        members: the metrics by their labels.
    """

    name: str
    kind: str
    help: str
    labels: list[str]
    bounds: tuple[float, ...] | None
    members: dict[_Labels, Metric] = field(default_factory=dict)

    @property
    def samples(self) -> list[Sample]:
        """All numbers of the name; the labels of a histogram's ranges include `le`."""
        return [
            Sample(self.name + suffix, {**dict(labels), **further}, value)
            for labels, member in list(self.members.items())
            for suffix, further, value in member.samples()
        ]


class Registry:
    """The metrics of one task, which creates the registry at its start and passes it down."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._lock = threading.Lock()

    def counter(self, name: str, help_text: str = "", /, **labels: object) -> Counter:
        """Returns the counter of this name and these labels, the same one each time.

        Raises:
            ValueError: the name breaks the conventions, or has another kind or other labels.
        """
        return self._member(Counter(), name, help_text, labels)

    def gauge(self, name: str, help_text: str = "", /, **labels: object) -> Gauge:
        """Returns the gauge of this name and these labels, the same one each time.

        Raises:
            ValueError: the name breaks the conventions, or has another kind or other labels.
        """
        return self._member(Gauge(), name, help_text, labels)

    def histogram(
        self,
        name: str,
        help_text: str = "",
        bounds: Sequence[float] = SECONDS_BUCKETS,
        /,
        **labels: object,
    ) -> Histogram:
        """Returns the histogram of this name and these labels, the same one each time.

        Raises:
            ValueError: the name breaks the conventions, has another kind, labels or bounds, or the
                bounds do not ascend.
        """
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"the bounds of {name} do not ascend: {list(bounds)}")
        return self._member(Histogram(bounds), name, help_text, labels)

    def value(self, name: str, **labels: object) -> float:
        """Returns the value of a counter or gauge, or the number of values of a histogram.

        It is 0 if there is no metric with these labels.

        Raises:
            KeyError: there is no metric of this name.
        """
        family = self._families.get(name)
        if family is None:
            raise KeyError(f"no metric is called {name}; there are {sorted(self._families)}")
        member = family.members.get(_key(labels))
        return 0 if member is None else member.value

    def families(self) -> list[Family]:
        """Returns all metrics, name by name, for exporters."""
        return list(self._families.values())

    def _member(self, new: _M, name: str, help_text: str, labels: dict[str, object]) -> _M:
        kind, names = type(new).__name__.lower(), sorted(labels)
        bounds = getattr(new, "bounds", None)
        with self._lock:
            family = self._families.get(name)
            if family is None:
                _check_name(name, kind)
                family = self._families[name] = Family(name, kind, help_text, names, bounds)
            if family.kind != kind:
                raise ValueError(f"{name} is a {family.kind}, not a {kind}")
            if family.labels != names:
                raise ValueError(f"{name} has the labels {family.labels}, not {names}")
            if family.bounds != bounds:
                raise ValueError(f"{name} has other bounds already")
            member = family.members.setdefault(_key(labels), new)
            assert isinstance(member, type(new))
            return member


def _key(labels: dict[str, object]) -> _Labels:
    return tuple(sorted((label, str(value)) for label, value in labels.items()))


def _check_name(name: str, kind: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a valid metric name: write trireme_ and words in lower case"
        )
    if name.endswith("_total") != (kind == "counter"):
        raise ValueError(f"{name}: names of counters, and only those, end in _total")

"""Serves a task's metrics over HTTP for Prometheus.

The server is off by default, and listens on this host only by default. Monitoring must not end a
job: if the port is taken, a warning is logged and the task continues.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Thread
from typing import NamedTuple, get_args
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from trireme.cluster.messages import ClusterStatus, TaskState
from trireme.cluster.placement import missing_copies
from trireme.cluster.spec import task_name

_log = logging.getLogger(__name__)

Source = Callable[[], Mapping[str, float] | ClusterStatus]
"""Returns numbers by name, or the job's status; `pushes/stale` is of the family `pushes`."""

_LABELS = {
    **{"checkpoints": "outcome", "phase_seconds": "phase", "pushes": "verdict", "shards": "role"},
    **{"task_quiet_seconds": "member", "tasks": "state", "worker_lag": "worker"},
}
"""The label of families of several metrics; docs/monitoring.md says what each is."""

_COUNTERS = (
    *("bytes_pulled", "bytes_pushed", "checkpoints", "corruptions", "examples", "log_bytes"),
    *("log_entries", "phase_seconds", "push_staleness", "pushes", "staleness", "takeovers"),
)


class Exposition(AbstractContextManager["Exposition"]):
    """Serves metrics at `/metrics`, the attribute `address`, on a thread of its own."""

    def __init__(self, address: str, server: WSGIServer, thread: Thread) -> None:
        self.address = address
        self._server = server
        self._thread = thread

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def expose(sources: Sequence[Source], task: str, host: str, port: int) -> Exposition | None:
    """Serves the metrics of a task; returns None, with a warning, if that fails.

    The sources are called in the thread of the HTTP server. Port 0 lets the system choose one.
    """
    registry = CollectorRegistry()
    for source in sources:
        registry.register(Metrics(source, task))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        _log.warning(
            "no metrics for Prometheus: %s cannot serve metrics at %s:%d: %s. Choose another "
            "--metrics-port, or 0 for any",
            *(task, host, port, error),
        )
        return None
    return Exposition(f"http://{host}:{server.server_port}/metrics", server, thread)


class Metrics(NamedTuple):
    """The metrics of one source, each with the label `task`."""

    source: Source
    task: str

    def describe(self) -> list[Metric]:
        return []  # registering asks for no metric

    def collect(self) -> Iterator[Metric]:
        found = self.source()
        metrics = membership(found) if isinstance(found, ClusterStatus) else families(found)
        for metric in metrics:
            metric.samples = [
                sample._replace(labels={**sample.labels, "task": self.task})
                for sample in metric.samples
            ]
            yield metric


def families(numbers: Mapping[str, float]) -> Iterator[Metric]:
    """Yields the metrics of numbers by name."""
    grouped: dict[str, dict[str, float]] = {}
    for each, value in numbers.items():
        name, _, label = each.partition("/")
        grouped.setdefault(name, {})[label] = value
    for name, values in grouped.items():
        text, label = name.replace("_", " ").capitalize(), _LABELS.get(name, "")
        if "count" in values:
            count, total = int(values["count"]), values["sum"]
            yield SummaryMetricFamily(f"trireme_{name}", text, count, total)
            continue
        kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
        family = kind(f"trireme_{name}", text, labels=[label] if label else [])
        for each, value in values.items():
            family.add_metric([each] if label else [], value)
        yield family


def membership(status: ClusterStatus) -> Iterator[Metric]:
    """Yields the metrics of a job's membership, from the coordinator's status."""
    missing = sum(missing_copies(status.shards, status.servers, status.replicas))
    counts = Counter(task.state for task in status.tasks)
    quiet = {
        f"task_quiet_seconds/{task_name(task.role, task.index)}": task.quiet_seconds
        for task in status.tasks
        if task.quiet_seconds >= 0
    }
    numbers = {"view": status.view, "generation": status.generation, "life": status.life}
    states = {f"tasks/{state}": counts[state] for state in get_args(TaskState)}
    yield from families({**numbers, "missing_copies": missing, **states, **quiet})

"""Serves a task's metrics over HTTP for Prometheus.

The server is off by default, and listens on this host only by default. Monitoring must not end a
job: if the port is taken, a warning is logged and the task continues.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any, NamedTuple, Self, get_args
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trireme.cluster.messages import ClusterStatus, TaskState
from trireme.cluster.placement import missing_copies
from trireme.cluster.spec import task_name

_log = logging.getLogger(__name__)


class Exposition:
    """Serves metrics at `/metrics`, the attribute `address`, on a thread of its own."""

    def __init__(self, address: str, server: WSGIServer, thread: Thread) -> None:
        self.address = address
        self._server = server
        self._thread = thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving. May be called again."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def expose(sources: Sequence[Any], task: str, host: str, port: int) -> Exposition | None:
    """Serves metrics; returns None, with a warning, if that fails.

    Args:
        sources: collectors, which yield the metrics in the thread of the HTTP server, or functions
            that return the status of the job.
        task: the task's name, the label `task` of each metric.
        host: the address to listen on.
        port: 0 lets the system choose.
    """
    registry = CollectorRegistry()
    for each in sources:
        registry.register(_Labelled(MembershipMetrics(each) if callable(each) else each, task))
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


class _Labelled(NamedTuple):
    """A collector whose metrics have the label `task`."""

    collector: Collector
    task: str

    def describe(self) -> list[Metric]:
        return []  # registering asks for no metric

    def collect(self) -> Iterator[Metric]:
        for metric in self.collector.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "task": self.task})
                for sample in metric.samples
            ]
            yield metric


class MembershipMetrics(NamedTuple):
    """The metrics of a job's membership, from the coordinator's status."""

    status: Callable[[], ClusterStatus]

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics for Prometheus."""
        status = self.status()
        missing = sum(missing_copies(status.shards, status.servers, status.replicas))
        for name, text, value in (
            ("view", "The number of the newest view", status.view),
            ("generation", "How the parameters are divided", status.generation),
            ("life", "How often all copies of a shard were lost", status.life),
            ("missing_copies", "Copies of shards that are missing or being filled", missing),
        ):
            yield GaugeMetricFamily(f"trireme_{name}", text, value)
        counts = Counter(task.state for task in status.tasks)
        tasks = GaugeMetricFamily("trireme_tasks", "Tasks by their state", labels=["state"])
        for state in get_args(TaskState):
            tasks.add_metric([state], counts[state])
        text = "Since the task was last heard"
        quiet = GaugeMetricFamily("trireme_task_quiet_seconds", text, labels=["member"])
        for task in status.tasks:
            if task.quiet_seconds >= 0:
                quiet.add_metric([task_name(task.role, task.index)], task.quiet_seconds)
        yield from (tasks, quiet)

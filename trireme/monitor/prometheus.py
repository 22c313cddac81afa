"""Serves a task's metrics over HTTP for Prometheus.

The server is off by default, and listens on this host only by default. Monitoring must not end a
job: if the port is taken, a warning is logged and the task continues.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Self, get_args

from trireme.cluster.messages import ClusterStatus, TaskState
from trireme.cluster.placement import missing_copies
from trireme.cluster.spec import task_name
from trireme.metrics import Registry

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import Metric

_log = logging.getLogger(__name__)


class Exposition:
    """Serves the metrics of a registry at `/metrics`, on a thread of its own; see `expose`.

    Attributes:
        address: where the metrics are served.
    """

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


def expose(
    registry: Registry,
    task: str,
    host: str,
    port: int | None,
    look: Callable[[], object] = lambda: None,
) -> Exposition | None:
    """Serves metrics if a port is given; returns None, with a warning, if that fails.

    Args:
        registry: the registry of the metrics.
        task: the task's name, the label `task` of each metric.
        host: the address to listen on.
        port: the port; 0 lets the system choose, None serves nothing.
        look: called before each scrape, to update metrics that are not counted continuously.
    """
    if port is None:
        return None
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        collectors = CollectorRegistry()
        collectors.register(_Collector(registry, task, look))
        server, thread = start_http_server(port, addr=host, registry=collectors)
    except ImportError as error:
        _log.warning(
            "no metrics for Prometheus: they need prometheus-client, which cannot be imported here "
            "(%s): pip install 'prometheus-client>=0.20'",
            error,
        )
        return None
    except (OSError, OverflowError) as error:
        _log.warning(
            "no metrics for Prometheus: %s cannot serve metrics at %s:%d: %s. Choose another "
            "--metrics-port, or 0 for any",
            *(task, host, port, error),
        )
        return None
    return Exposition(f"http://{host}:{server.server_port}/metrics", server, thread)


class _Collector(NamedTuple):
    """Provides the metrics of a registry to prometheus-client."""

    registry: Registry
    task: str
    look: Callable[[], object]

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import Metric

        self.look()
        for family in self.registry.families():
            # The exposition adds the suffix of counters by itself.
            name = family.name.removesuffix("_total")
            metric = Metric(name, family.help or name, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, {**sample.labels, "task": self.task}, sample.value)
            yield metric


class MembershipMetrics:
    """Gauges of a job's membership.

    Attributes:
        registry: the registry of the gauges.
    """

    def __init__(self) -> None:
        self.registry = Registry()
        self._view = self.registry.gauge("trireme_view", "The number of the newest view")
        self._generation = self.registry.gauge(
            "trireme_generation", "How the parameters are divided"
        )
        self._life = self.registry.gauge(
            "trireme_life", "How often all copies of a shard were lost"
        )
        self._missing = self.registry.gauge(
            "trireme_missing_copies", "Copies of shards that are missing or being filled"
        )
        self._states = {
            state: self.registry.gauge("trireme_tasks", "Tasks by their state", state=state)
            for state in get_args(TaskState)
        }

    def take(self, status: ClusterStatus) -> None:
        """Updates the gauges from the coordinator's status."""
        self._view.value = status.view
        self._generation.value, self._life.value = status.generation, status.life
        self._missing.value = sum(missing_copies(status.shards, status.servers, status.replicas))
        counts = Counter(task.state for task in status.tasks)
        for state, gauge in self._states.items():
            gauge.value = counts[state]
        for task in status.tasks:
            if task.quiet_seconds >= 0:
                name = task_name(task.role, task.index)
                self.registry.gauge(
                    "trireme_task_quiet_seconds", "Since the task was last heard", member=name
                ).value = task.quiet_seconds

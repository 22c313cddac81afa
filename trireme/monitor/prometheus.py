"""Prometheus: a task's metrics over HTTP, for whoever scrapes them.

Off unless it is asked for, and open to this host only unless it is told otherwise. A monitor never
ends what it watches: where the port cannot be had, a warning is logged and the task goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from trireme.errors import ConfigurationError
from trireme.metrics import Registry

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["Exposition", "expose"]

_log = logging.getLogger(__name__)


class Exposition:
    """Serves the metrics of a registry at `/metrics`, on a thread of its own.

    Args:
        registry: whose.
        task: the task's name, which goes with each number as the label `task`.
        host: the address to listen at.
        port: the port; 0 leaves it to the system.
        look: called before each scrape, to bring up to date what nobody counts by itself.

    Raises:
        ConfigurationError: the port cannot be had, or prometheus-client is not installed.
    """

    def __init__(
        self,
        registry: Registry,
        task: str,
        host: str,
        port: int,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ConfigurationError(
                f"metrics for Prometheus need prometheus-client, which cannot be imported here "
                f"({error}): pip install 'prometheus-client>=0.20'"
            ) from error
        collectors = CollectorRegistry()
        collectors.register(_Collector(registry, task, look))
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=collectors)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"{task} cannot serve metrics at {host}:{port}: {error}. Choose another "
                "--metrics-port, or 0 for any"
            ) from error
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Serves no longer. May be repeated."""
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
    """Serves metrics where that is asked for; where it fails, says so and returns None.

    Args:
        registry: whose.
        task: the task's name.
        host: the address to listen at.
        port: the port; 0 leaves it to the system, None is for nowhere.
        look: called before each scrape.
    """
    if port is None:
        return None
    try:
        return Exposition(registry, task, host, port, look)
    except ConfigurationError as error:
        _log.warning("no metrics for Prometheus: %s", error)
        return None


class _Collector:
    """Gives prometheus-client what a registry has."""

    def __init__(self, registry: Registry, task: str, look: Callable[[], object]) -> None:
        self._registry = registry
        self._task = task
        self._look = look

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import Metric

        self._look()
        for family in self._registry.families():
            # The exposition adds the suffix of counters by itself.
            name = family.name.removesuffix("_total")
            metric = Metric(name, family.help or name, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, {**sample.labels, "task": self._task}, sample.value)
            yield metric

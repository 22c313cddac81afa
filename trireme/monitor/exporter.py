"""What serves a task's metrics, for those who ask: a plug-in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from trireme.launch.config.task_config import TaskConfig
from trireme.plugins import Plugins


class Exposition(AbstractContextManager[Any], Protocol):
    """Serves metrics at an address until it is closed."""

    address: str

    def close(self) -> None:
        """Stops serving. May be called again."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """A kind of exposition; a source returns numbers by name, or a `ClusterStatus`."""

    # The function from sources, the task's name, and the host and port to listen on, to an
    # `Exposition`, as `package.module:function`; None where that fails, which it has logged.
    open: str


def expose(sources: Sequence[object], task: TaskConfig) -> Exposition | None:
    """Serves a task's metrics if --metrics-port is given."""
    port = task.scrape_port
    if port is None:
        return None
    exporter = Plugins("trireme.exporters", "exporter", Exporter).imported("prometheus", "open")
    opened: Exposition | None = exporter(sources, task.name, task.config.output.metrics_host, port)
    return opened

"""Metrics of the tasks of a job, as the coordinator knows them."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from trireme.cluster.messages import ClusterStatus, TaskState
from trireme.cluster.spec import task_name
from trireme.metrics import Registry

__all__ = ["MembershipMetrics"]


class MembershipMetrics:
    """Gauges of a job's membership.

    Attributes:
        registry: the registry of the gauges.
    """

    def __init__(self) -> None:
        self.registry = Registry()
        self._view = self.registry.gauge("trireme_view", "The number of the newest view")
        self._states = {
            state: self.registry.gauge("trireme_tasks", "Tasks by their state", state=state)
            for state in get_args(TaskState)
        }

    def take(self, status: ClusterStatus) -> None:
        """Updates the gauges from the coordinator's status."""
        self._view.value = status.view
        counts = Counter(task.state for task in status.tasks)
        for state, gauge in self._states.items():
            gauge.value = counts[state]
        for task in status.tasks:
            if task.quiet_seconds >= 0:
                name = task_name(task.role, task.index)
                self.registry.gauge(
                    "trireme_task_quiet_seconds", "Since the task was last heard", member=name
                ).value = task.quiet_seconds

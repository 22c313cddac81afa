"""One live line about a whole job, for `trireme run` on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from trireme.errors import WireError

if TYPE_CHECKING:
    from trireme.cluster.messages import ClusterStatus, TaskStatus

__all__ = ["JobWatch", "status_line"]

_SECONDS = 0.5
_BAR = 24


class JobWatch:
    """Queries a job's coordinator twice a second, on a thread of its own, and shows a status line.

    Args:
        coordinator: returns the coordinator's address once it is known, and "" before.
        job: the job's id.
        secret: the job's secret.
        show: called with the line; with None when there is nothing to show.
    """

    def __init__(
        self,
        coordinator: Callable[[], str],
        job: str,
        secret: bytes,
        show: Callable[[str | None], None],
    ) -> None:
        self._coordinator = coordinator
        self._job = job
        self._secret = secret
        self._show = show
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-watch", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and removes the line."""
        self._ended.set()
        self._thread.join(timeout=2.0)
        self._show(None)

    def _run(self) -> None:
        from trireme.cluster.coordinator import query_status

        while not self._ended.wait(_SECONDS):
            address = self._coordinator()
            if not address:
                continue
            try:
                status = query_status(address, self._job, self._secret, timeout=1.0)
            except WireError:
                self._show(None)
                continue
            if not self._ended.is_set():
                self._show(status_line(status))


def status_line(status: ClusterStatus) -> str:
    """Returns the status of a job in one line."""
    if status.missing:
        return f"waiting for {', '.join(status.missing)}"
    workers = [task for task in status.tasks if task.role == "worker" and task.status]
    parts = [_advance(workers), *_figures(workers), _states(workers)]
    return "  ".join(part for part in parts if part)


def _advance(workers: list[TaskStatus]) -> str:
    step = max((int(w.status.get("global_step", 0)) for w in workers), default=0)
    end = max((int(w.status.get("max_steps", 0)) for w in workers), default=0)
    if not end:
        return f"global step {step}" if step else ""
    filled = round(_BAR * min(step / end, 1.0))
    return f"{'━' * filled}{'╌' * (_BAR - filled)} global step {step}/{end}"


def _figures(workers: list[TaskStatus]) -> list[str]:
    """Returns the chief's loss, and the examples per second of all workers together."""
    figures = []
    if workers and "loss" in workers[0].status:
        figures.append(f"loss {float(workers[0].status['loss']):.4g}")
    pace = sum(float(w.status.get("examples_per_second", 0.0)) for w in workers)
    if pace:
        figures.append(f"{pace:,.0f} examples/s")
    return figures


def _states(workers: list[TaskStatus]) -> str:
    """Returns the workers' states: one if all have the same, else each worker's."""
    states = {f"worker:{w.index}": str(w.status.get("state", w.state)) for w in workers}
    if len(set(states.values())) == 1:
        return next(iter(states.values()))
    return ", ".join(f"{name} {state}" for name, state in states.items())

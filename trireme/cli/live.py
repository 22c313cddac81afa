"""The status of a running job, and one live line of it for `trireme run` on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.certificates import Certificates
from trireme.errors import UsageError, WireError
from trireme.launch.config.secret import read_private, read_secret
from trireme.launch.run_directory import JobRecord, read_record

if TYPE_CHECKING:
    from trireme.cluster.member import Observer
    from trireme.cluster.messages import ClusterStatus, TaskStatus

_SECONDS = 0.5
_BAR = 24


def query(record: JobRecord, timeout: float = 5.0) -> ClusterStatus:
    """Asks the coordinator of a running job for the job's status."""
    return observer(record, timeout).query_status()


def observer(record: JobRecord, timeout: float = 5.0) -> Observer:
    """Returns an observer of a running job, which may ask its coordinator."""
    from trireme.cluster.member import Observer

    secret = bytes.fromhex(read_secret(Path(record.secret_file)))
    certificates = None
    if record.certificate_file:
        file = Path(record.certificate_file)
        certificates = Certificates(read_private(file, "the observer's key", "run the job again"))
    return Observer(record.coordinator, record.job, secret, certificates, timeout)


@contextmanager
def job_watch(run: Path, show: Callable[[str | None], None]) -> Iterator[None]:
    """Queries a job's coordinator twice a second, on a thread of its own, and shows a status line.

    The thread and the line end with the context.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_SECONDS):
            line = None
            with suppress(UsageError, WireError):
                record = read_record(run)
                if not record.coordinator:
                    continue
                line = status_line(query(record, timeout=1.0))
            if not ended.is_set():
                show(line)

    thread = threading.Thread(target=watch, name="job-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=2.0)
        show(None)


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

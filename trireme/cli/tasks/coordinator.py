"""A job's coordinator: in its launcher's process, or alone in one that was started by hand."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import Membership
from trireme.launch.output import Console
from trireme.monitor.exporter import expose
from trireme.printable import printable

if TYPE_CHECKING:
    from trireme.cluster.coordinator import Journal
    from trireme.cluster.messages import ClusterStatus
    from trireme.cluster.state import Policy, State

_HEARTBEATS = 5
"""How many heartbeats a task sends in the time after which it is lost, so that one that is late, as
on a machine that is busy, is no loss."""
_HEARTBEAT_SECONDS, _RECONNECT_SECONDS = 1.0, 2.0  # at most
_END_SECONDS = 5.0


def policy_of(task: TaskConfig) -> Policy:
    """Returns what a job expects of its tasks."""
    from trireme.cluster.state import Policy

    silence = task.config.timeouts.heartbeat_timeout
    return Policy(
        workers=task.workers,
        servers=task.servers,
        join_timeout=task.config.timeouts.join_timeout,
        heartbeat_timeout=silence,
        heartbeat_interval=min(_HEARTBEAT_SECONDS, silence / _HEARTBEATS),
        reconnect_grace=min(_RECONNECT_SECONDS, silence),
        progress_timeout=task.config.timeouts.progress_timeout,
        rejoin_timeout=task.config.timeouts.rejoin_timeout,
        replicas=task.config.tasks.replicas,
        elastic=task.servers > 0 and task.group.size == 1,
        survives_loss=task.config.tasks.replicas > 1,
        wait_for_restart=task.config.timeouts.join_timeout if task.restarts_left else 0.0,
    )


class ServedCoordinator:
    """A coordinator, and the service that feeds it. It listens as soon as it is made."""

    def __init__(
        self,
        task: TaskConfig,
        *,
        journal: Journal | None = None,
        stays: bool = False,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        from trireme.cluster.coordinator import Coordinator
        from trireme.wire.message import Limits
        from trireme.wire.refusals import ServiceLimits
        from trireme.wire.service import Service
        from trireme.wire.transport import listen

        self._task = task
        listener = listen(
            task.listen,
            allow_plaintext=task.config.network.allow_plaintext,
            certificates=task.own_certificates,
        )
        self._coordinator = Coordinator(
            policy_of(task),
            journal=journal,
            on_done=None if stays else lambda: self._service.stop(),
            on_change=on_change,
        )
        self._service = Service(
            listener,
            [self._coordinator],
            job=task.job,
            secret=bytes.fromhex(task.secret),
            epoch=self._coordinator.state.epoch,
            serves=(task.name,),
            limits=ServiceLimits(frame=Limits(payload=0)),
        )
        self._coordinator.later = self._service.call_soon
        self.address = listener.address

    @property
    def state(self) -> State:
        """The state of the job; any thread may read it."""
        return self._coordinator.state

    @property
    def done(self) -> bool:
        """Whether the job is over and every task knows it."""
        return self._coordinator.done

    def run(self, say: Callable[[str], None]) -> None:
        """Serves until it is stopped, or the job is over."""
        from trireme.cluster.state import cluster_status

        def status() -> ClusterStatus:
            return cluster_status(time.monotonic(), self.state)

        with serve_metrics(self._task, (status,), say):
            self._service.run()

    def stop_job(self, reason: str, *, final: bool = True) -> None:
        """Stops the job before its end; see `Coordinator.stop_job`. Any thread may call it."""
        self._service.call_soon(partial(self._coordinator.stop_job, reason, final=final))


class HostedCoordinator(ServedCoordinator):
    """A coordinator on a thread of its launcher's process.

    It shows its lines on the console, which must not block, and calls `on_change` on its thread
    when the membership has changed.
    """

    def __init__(self, console: Console, task: TaskConfig, on_change: Callable[[], object]) -> None:
        super().__init__(task, stays=True, on_change=on_change)
        self._seen: tuple[State, bool] | None = None
        self._members = Membership()
        self._error: BaseException | None = None
        self._on_change = on_change
        self._console = console
        self._thread = threading.Thread(target=self._run, name=task.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        def say(text: str) -> None:
            self._console.line(self._task.name, text, False)

        def warn(text: str) -> None:
            self._console.say(f"coordinator: {printable(text)}", alarm=True)

        log, handler = logging.getLogger("trireme"), _TakeWarnings(warn)
        log.addHandler(handler)
        try:
            self.run(say)
        except BaseException as error:
            self._error = error
            self._on_change()
        finally:
            log.removeHandler(handler)

    def membership(self) -> Membership:
        """Returns the members of the job now; raises what has ended the coordinator's thread."""
        if self._error is not None:
            raise self._error
        seen = self.state, self.done
        if self._seen is None or seen[0] is not self._seen[0] or seen[1] != self._seen[1]:
            self._seen, self._members = seen, membership(*seen)
        return self._members

    def process_ended(self, task: str, host: str, pid: int, reason: str) -> None:
        """Gives up a task whose process has ended; see `Coordinator.process_ended`."""
        from trireme.cluster.membership import ProcessEnded

        ended = ProcessEnded(task, host, pid, reason)
        self._service.call_soon(partial(self._coordinator.process_ended, ended))

    def close(self) -> None:
        self._service.stop()
        self._thread.join(_END_SECONDS)


def membership(state: State, done: bool) -> Membership:
    """Returns what a launcher has to know of a job's state."""
    tasks = state.tasks.values()
    return Membership(
        joined=any(task.role == "worker" and task.incarnation > 0 for task in tasks),
        formed=state.phase != "forming",
        lost={task.name: (task.pid, task.reason) for task in tasks if task.state == "lost"},
        wanted=tuple(task.name for role in ("ps", "worker") for task in state.wanted(role)),
        dismissed=tuple(task.name for task in tasks if task.dismissed),
        requests=state.requests,
        over="" if state.over is None or not done else state.over.outcome,
    )


def serve_metrics(
    task: TaskConfig, sources: Sequence[object], say: Callable[[str], None]
) -> AbstractContextManager[object]:
    """Serves a task's metrics while the block runs, if --metrics-port is given."""
    exposition = expose(sources, task)
    if exposition is None:
        return nullcontext()
    say(f"metrics: {exposition.address}")
    return exposition


class _TakeWarnings(logging.Handler):
    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record.getMessage())

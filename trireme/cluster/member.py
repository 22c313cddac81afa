"""A task's membership of a job: join, wait for views, report a status, leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from trireme.cluster.member_loop import MemberLoop
from trireme.cluster.member_protocol import MemberConfig
from trireme.cluster.member_state import MemberState, Subscriber
from trireme.cluster.messages import MAX_LINE, JobOver, Leave, Outcome, StatusValue, WaitingFor
from trireme.cluster.view import View, WorkerEntry
from trireme.errors import ClusterError, JobFailed, WaitTimeout
from trireme.wire.wakeup import Wakeup

__all__ = ["Member", "MemberConfig"]

_CLOSE_SECONDS = 1.0
_SLACK_SECONDS = 15.0  # an attempt to connect that began in time may take this much longer


class Member:
    """One task's membership, which a background thread keeps up over one connection.

    When the connection breaks, the thread connects again. While the coordinator is unreachable,
    the task goes on with its newest view; after `coordinator_timeout` the job counts as failed,
    and `over` is set. Any thread may use a member.

    Args:
        config: which task this is and where its coordinator listens.
    """

    def __init__(self, config: MemberConfig) -> None:
        self._config = config
        self._state = MemberState()
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=MemberLoop(config, self._state, self._wakeup).run,
            name=f"trireme-member-{config.name}",
            daemon=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def incarnation(self) -> int:
        """The number of this start of the task; 0 before it has joined.

        It grows if the coordinator has given this process up, because it sent nothing for too long,
        and then admits it again.
        """
        return self._state.incarnation

    @property
    def epoch(self) -> str:
        """The epoch of the job that this task has joined; "" before it has.

        Each start of a job has another epoch, even with the same id, secret and addresses.
        """
        return self._state.epoch

    @property
    def view(self) -> View | None:
        """The newest view; None before the first."""
        return self._state.view

    @property
    def over(self) -> JobOver | None:
        """How the job ended, or why this task is not a member any more; None while it is."""
        return self._state.over

    def check(self) -> None:
        """Returns while the job runs.

        Raises:
            JobFailed: the job is over. The message says how it ended, and why.
        """
        over = self._state.over
        if over is not None:
            raise JobFailed(f"the job is over, {over.outcome}: {over.reason}")

    def subscribe(self, subscriber: Subscriber) -> None:
        """Registers a function to be called with every new `View`, and at last with the `JobOver`.

        It is called in the member's thread and must not block. Subscribe before `join` to miss no
        view.
        """
        self._state.subscribe(subscriber)

    def report(self, status: Mapping[str, StatusValue]) -> None:
        """Sets values of the status that the next heartbeats report. Does not block.

        Raises:
            TypeError: a value is neither a number nor a string.
        """
        self._state.report(status)

    def observe(self, extra_status: Callable[[], Mapping[str, StatusValue]]) -> None:
        """Registers a function that returns a further status for each heartbeat, in its thread.

        So a heartbeat can report on another thread, even if that thread hangs.
        """
        with self._state.change():
            self._state.extra_status = extra_status

    def start(self) -> None:
        """Begins to join and does not wait. Subscribers learn the result.

        For a process whose only thread must serve meanwhile, such as one that hosts the
        coordinator.
        """
        if self._thread.ident is None:
            self._thread.start()

    def join(self, timeout: float | None = None) -> int:
        """Joins the job. Tries until it succeeds, as the coordinator may start later.

        Args:
            timeout: in seconds. The config's `connect_timeout` counts where it is shorter.

        Returns:
            The incarnation.

        Raises:
            ConnectTimeout: the coordinator could not be reached within `connect_timeout`.
            WaitTimeout: `timeout` passed first.
            AuthenticationError: the coordinator serves another job, or has another secret.
            ConfigurationError: the cluster has no such task, or the address is malformed.
            TaskClaimedError: another live process holds this role and index.
            JobFailed: the job is over already.
        """
        state = self._state
        self.start()
        seconds = self._config.connect_timeout + _SLACK_SECONDS if timeout is None else timeout
        state.wait_until(
            lambda: bool(state.incarnation or state.over or state.ended),
            time.monotonic() + seconds,
        )
        if state.failure is not None:
            raise state.failure
        self._check_running()
        if not state.incarnation:
            raise WaitTimeout(
                f"{self._config.name} could not join within {seconds:g} s; it had tried to reach "
                f"the coordinator at {self._config.coordinator}: check that it runs"
            )
        return state.incarnation

    def wait_for_view(
        self,
        newer_than: int = 0,
        *,
        timeout: float,
        on_waiting: Callable[[Sequence[str], float], None] | None = None,
    ) -> View:
        """Blocks until there is a view with a number above `newer_than`, and returns the newest.

        Args:
            newer_than: the number of the view that the caller knows already; 0 for any view.
            timeout: in seconds.
            on_waiting: called in this thread, every few seconds, with the names of the tasks that
                the job waits for, and the seconds until the job fails.

        Raises:
            JobFailed: the job is over. `over` says how; it may have been interrupted.
            WaitTimeout: no such view came in time. The message names the tasks that the job waits
                for.
        """
        state = self._state
        deadline = time.monotonic() + timeout
        notified: tuple[WaitingFor, float] | None = None

        def condition() -> bool:
            newer = state.view is not None and state.view.number > newer_than
            return newer or bool(state.over or state.ended) or state.waiting is not notified

        while True:
            changed = state.wait_until(condition, deadline)
            self._check_running()
            if state.view is not None and state.view.number > newer_than:
                return state.view
            if not changed:
                raise WaitTimeout(self._why_no_view(newer_than, timeout))
            notified = state.waiting
            if notified is not None and on_waiting is not None:
                notice, until = notified
                on_waiting(notice.names, max(0.0, until - time.monotonic()))

    def wait_until_back(self, *, timeout: float) -> int:
        """Blocks until the newest view contains this worker, and returns its incarnation.

        For a worker that a server takes for lost: if the coordinator had given it up, it is a
        member again, as its next incarnation, once its thread has joined again.

        Args:
            timeout: in seconds.

        Raises:
            JobFailed: the job is over, or another process has taken this worker's place.
            WaitTimeout: it was not admitted in time.
        """
        state, index = self._state, self._config.index

        def back() -> bool:
            workers = () if state.view is None else state.view.workers
            return WorkerEntry(index, state.incarnation) in workers

        state.wait_until(
            lambda: bool(back() or state.over or state.ended), time.monotonic() + timeout
        )
        self._check_running()
        if not back():
            raise WaitTimeout(
                f"{self._config.name} was taken for lost, and the coordinator at "
                f"{self._config.coordinator} did not admit it again within {timeout:g} s"
            )
        return state.incarnation

    def leave(self, outcome: Outcome, reason: str = "", *, timeout: float = 5.0) -> bool:
        """Reports that this task ends, and how; blocks until the coordinator has received it.

        If the job is over already nothing is sent. Until `close`, a member that has left still
        learns how the job ends.

        Args:
            outcome: `failed` ends the job for everybody, with this task as the culprit.
            reason: why. Of one above `MAX_LINE` characters only the beginning is sent.
            timeout: in seconds.

        Returns:
            Whether the coordinator knows; False if it is unreachable, or did not answer in time.
        """
        state = self._state
        with state.change():
            if state.leaving is None:
                text = reason.encode("utf-8", "replace").decode()  # what is no text cannot be sent
                state.leaving = Leave(outcome, text[:MAX_LINE])
        self._wakeup.wake()
        state.wait_until(
            lambda: state.left or state.over is not None or state.ended or not state.incarnation,
            time.monotonic() + timeout,
        )
        return state.left or state.confirmed

    def close(self) -> None:
        """Ends the thread and its connection. May be repeated.

        The coordinator counts a task as lost that closes without having left.
        """
        with self._state.change():
            self._state.closing = True
        self._wakeup.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # An attempt to connect may take a little longer; then the thread ends by itself.
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._wakeup.close()

    def _check_running(self) -> None:
        self.check()
        if self._state.ended:
            raise ClusterError(
                f"{self._config.name} is no longer a member of the job: it has left or closed"
            )

    def _why_no_view(self, newer_than: int, timeout: float) -> str:
        what = f"no view after number {newer_than}" if newer_than else "no view"
        waiting = self._state.waiting
        if waiting is None:
            return f"{what} came within {timeout:g} s: ask the coordinator with `trireme status`"
        names = ", ".join(waiting[0].names)
        return f"{what} came within {timeout:g} s: the job waits for {names}"

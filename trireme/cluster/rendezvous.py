"""How a task takes part in a job: join, watch the view, say how it goes, leave."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from trireme.cluster.board import Board, Subscriber
from trireme.cluster.conversation import Conversation, MemberConfig
from trireme.cluster.messages import JobOver, Leave, Outcome, StatusValue, WaitingFor, clip_details
from trireme.cluster.view import View, WorkerEntry
from trireme.errors import ClusterError, JobFailed, WaitTimeout

__all__ = ["Member", "MemberConfig"]

_CLOSE_SECONDS = 1.0
_SLACK_SECONDS = 15.0  # an attempt to connect that began in time may take so much longer


class Member:
    """One task's membership, kept up by a background thread over one connection.

    When the connection breaks, the thread connects again by itself. When the coordinator is gone,
    the task goes on with the view that it has; after `coordinator_timeout`, `over` says that the
    job failed. Any thread may use a member.

    Args:
        config: who this task is and where its coordinator listens.
    """

    def __init__(self, config: MemberConfig) -> None:
        self._config = config
        self._board = Board()
        self._bell, clapper = socket.socketpair()
        self._clapper = clapper
        for end in (self._bell, clapper):
            end.setblocking(False)
        self._thread = threading.Thread(
            target=Conversation(config, self._board, self._bell).run,
            name=f"trireme-member-{config.name}",
            daemon=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def incarnation(self) -> int:
        """Which start of this task the process is; 0 before it has joined.

        It grows if the coordinator had given this process up, because it was silent for too long,
        and took it in again.
        """
        return self._board.incarnation

    @property
    def epoch(self) -> str:
        """Which start of the job this task has joined; "" before it has.

        Two starts of a job never have the same, though its id, its secret and its addresses are.
        """
        return self._board.epoch

    @property
    def view(self) -> View | None:
        """The newest view; None before the first."""
        return self._board.view

    @property
    def over(self) -> JobOver | None:
        """How the job ended, or why this task cannot take part (any more); None while it does."""
        return self._board.over

    def check(self) -> None:
        """Returns while the job runs.

        Raises:
            JobFailed: it is over; says how it ended, and why.
        """
        over = self._board.over
        if over is not None:
            raise JobFailed(f"the job is over, {over.outcome}: {over.reason}")

    @property
    def stop_requested(self) -> str | None:
        """Why somebody asked that the job be saved and stopped; None if nobody did."""
        return self._board.stop

    def subscribe(self, subscriber: Subscriber) -> None:
        """Has a function called with every new `View`, and at last with the `JobOver`.

        It is called in the member's thread and must not block. Subscribe before `join` to miss
        nothing.
        """
        self._board.subscribe(subscriber)

    def report(self, status: Mapping[str, StatusValue]) -> None:
        """Stores what the next heartbeats shall say of this task, merged by name. Costs nothing.

        Raises:
            TypeError: a value is neither a number nor a string.
        """
        self._board.report(status)

    def observe(self, pulse: Callable[[], Mapping[str, StatusValue]]) -> None:
        """Has a function asked, at each heartbeat and in its thread, what else it shall say.

        So a heartbeat can tell how another thread is, whatever that does.
        """
        with self._board.change():
            self._board.pulse = pulse

    def start(self) -> None:
        """Begins to join without waiting for it. What comes of it the subscribers are told.

        For a process whose only thread must serve meanwhile, such as one that hosts the
        coordinator.
        """
        if self._thread.ident is None:
            self._thread.start()

    def join(self, timeout: float | None = None) -> int:
        """Takes part in the job. Tries until it can: the coordinator may start later.

        Args:
            timeout: in seconds; the config's `connect_timeout` decides where it is shorter.

        Returns:
            The incarnation.

        Raises:
            ConnectTimeout: the coordinator could not be reached within `connect_timeout`.
            WaitTimeout: `timeout` has passed before that.
            AuthenticationError: another job is served there, or with another secret.
            ConfigurationError: the cluster has no such task, or the address makes no sense.
            TaskClaimedError: another live process holds this role and index.
            JobFailed: the job is over already.
        """
        board = self._board
        self.start()
        seconds = self._config.connect_timeout + _SLACK_SECONDS if timeout is None else timeout
        board.await_change(
            lambda: bool(board.incarnation or board.over or board.ended),
            time.monotonic() + seconds,
        )
        if board.failure is not None:
            raise board.failure
        self._check_going_on()
        if not board.incarnation:
            raise WaitTimeout(
                f"{self._config.name} could not join within {seconds:g} s; it had tried to reach "
                f"the coordinator at {self._config.coordinator}: check that it runs"
            )
        return board.incarnation

    def wait_for_view(
        self,
        newer_than: int = 0,
        *,
        timeout: float,
        on_waiting: Callable[[Sequence[str], float], None] | None = None,
    ) -> View:
        """Blocks until there is a view with a number above `newer_than`, and returns the newest.

        Args:
            newer_than: the number of the view that is known already; 0 for any.
            timeout: in seconds.
            on_waiting: called in this thread, every few seconds, with the names of the tasks that
                the job waits for and the seconds until it fails.

        Raises:
            JobFailed: the job is over; `over` says how, which may be that it was interrupted.
            WaitTimeout: no such view came in time; names whom the job waits for, if anybody.
        """
        board = self._board
        deadline = time.monotonic() + timeout
        told: tuple[WaitingFor, float] | None = None

        def settled() -> bool:
            newer = board.view is not None and board.view.number > newer_than
            return newer or bool(board.over or board.ended) or board.waiting is not told

        while True:
            changed = board.await_change(settled, deadline)
            self._check_going_on()
            if board.view is not None and board.view.number > newer_than:
                return board.view
            if not changed:
                raise WaitTimeout(self._why_no_view(newer_than, timeout))
            told = board.waiting
            if told is not None and on_waiting is not None:
                notice, until = told
                on_waiting(notice.names, max(0.0, until - time.monotonic()))

    def wait_until_back(self, *, timeout: float) -> int:
        """Blocks until the newest view has this worker in it, and returns its incarnation.

        For a worker that others say is out of the job: if the coordinator had given it up, it
        takes part again, as its next incarnation, once its own thread has joined anew.

        Args:
            timeout: in seconds.

        Raises:
            JobFailed: the job is over, or another process has taken this worker's place.
            WaitTimeout: it was not let in in time.
        """
        board, index = self._board, self._config.index

        def back() -> bool:
            workers = () if board.view is None else board.view.workers
            return WorkerEntry(index, board.incarnation) in workers

        board.await_change(
            lambda: bool(back() or board.over or board.ended), time.monotonic() + timeout
        )
        self._check_going_on()
        if not back():
            raise WaitTimeout(
                f"{self._config.name} was taken for lost, and the coordinator at "
                f"{self._config.coordinator} did not take it in again within {timeout:g} s"
            )
        return board.incarnation

    def leave(
        self, outcome: Outcome, reason: str = "", details: str = "", *, timeout: float = 5.0
    ) -> bool:
        """Says that this task ends, and how; blocks until the coordinator has heard it.

        If the job is over already there is nothing left to say. Until `close`, a member that has
        left still hears of the job's end.

        Args:
            outcome: `failed` ends the job for everybody, with this task as the culprit.
            reason: in a line.
            details: such as a traceback; only the end of one above `MAX_DETAILS` bytes is sent.
            timeout: in seconds.

        Returns:
            Whether the coordinator knows: False if it is gone, or did not answer in time.
        """
        board = self._board
        with board.change():
            if board.leaving is None:
                board.leaving = Leave(outcome, clip_details(reason), clip_details(details))
        self._ring()
        board.await_change(
            lambda: board.left or board.over is not None or board.ended or not board.incarnation,
            time.monotonic() + timeout,
        )
        return board.left or board.told

    def close(self) -> None:
        """Ends the thread and its connection. May be repeated.

        A task that closes without having left is lost, as far as the coordinator can tell.
        """
        with self._board.change():
            self._board.closing = True
        self._ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # An attempt to connect may go on a little longer; the thread ends by itself then.
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._bell.close()
            self._clapper.close()

    def _ring(self) -> None:
        # A full pipe has woken the thread already; a closed one has no thread any more.
        with suppress(OSError):
            self._clapper.send(b"\0")

    def _check_going_on(self) -> None:
        self.check()
        if self._board.ended:
            raise ClusterError(f"{self._config.name} takes part no longer: it has left or closed")

    def _why_no_view(self, newer_than: int, timeout: float) -> str:
        what = f"no view after number {newer_than}" if newer_than else "no view"
        waiting = self._board.waiting
        if waiting is None:
            return f"{what} came within {timeout:g} s: ask the coordinator with `trireme status`"
        names = ", ".join(waiting[0].names)
        return f"{what} came within {timeout:g} s: the job waits for {names}"

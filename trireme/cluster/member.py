"""A task's membership of a job: join, wait for views, report a status, leave."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trireme.certificates import Certificates
from trireme.cluster.member_protocol import ATTEMPT_SECONDS, MemberConfig, MemberProtocol
from trireme.cluster.messages import (
    CLUSTER_CATALOG,
    MAX_LINE,
    ClusterStatus,
    Joined,
    Leave,
    Outcome,
    RequestRefused,
    Scale,
    Scaled,
    Signalled,
    StatusQuery,
    WaitingFor,
)
from trireme.cluster.spec import OBSERVER
from trireme.cluster.view import View, WorkerEntry
from trireme.errors import (
    AuthenticationError,
    ClusterError,
    ConfigurationError,
    FrameError,
    JobFailed,
    StaleEpochError,
    WaitTimeout,
    WireError,
    WireTimeout,
)
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Limits, Message
from trireme.wire.polling import Wakeup
from trireme.wire.transport import connect

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer", bound=Message)

_CLOSE_SECONDS = 1.0
_START_BITS = 60
_SLACK_SECONDS = 15.0  # an attempt to connect that began in time may take this much longer


class Member(MemberProtocol):
    """One task's membership, which a background thread keeps up over one connection after another.

    While the coordinator is unreachable the task goes on with its newest view; after the policy's
    `rejoin_timeout` the job counts as failed, and `over` is set. Any thread may use a member.
    """

    def __init__(self, config: MemberConfig) -> None:
        now, host = time.monotonic(), config.host or socket.gethostname()
        super().__init__(config, now, host, os.getpid(), 1 + secrets.randbits(_START_BITS))
        self._wakeup = Wakeup()  # woken when another thread has changed the state
        self._logged_at = now
        name = f"trireme-member-{config.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def check(self) -> None:
        """Raises `JobFailed` if the job is over, with how it ended, and why."""
        over = self.over
        if over is not None:
            raise JobFailed(f"the job is over, {over.outcome}: {over.reason}")

    def start(self) -> None:
        """Begins to join and does not wait, as where this thread serves the coordinator."""
        if self._thread.ident is None:
            self._thread.start()

    def join(self, timeout: float | None = None) -> int:
        """Joins the job, within `connect_timeout` or a shorter timeout; returns the incarnation."""
        self.start()
        seconds = self._config.connect_timeout + _SLACK_SECONDS if timeout is None else timeout
        self._wait(lambda: bool(self.incarnation) or self.failure is not None, seconds)
        if self.failure is not None:
            raise self.failure
        self._check_running()
        if not self.incarnation:
            raise WaitTimeout(
                f"{self._config.name} could not join within {seconds:g} s; it had tried to reach "
                f"the coordinator at {self._config.coordinator}: check that it runs"
            )
        return self.incarnation

    def wait_for_view(
        self, *, timeout: float, on_waiting: Callable[[Sequence[str], float], None] | None = None
    ) -> View:
        """Blocks until there is a view, and returns the newest.

        `on_waiting` is called in this thread, every few seconds, with the names of the tasks that
        the job waits for, and the seconds until the job fails.
        """
        deadline = time.monotonic() + timeout
        notified: tuple[WaitingFor, float] | None = None

        def news() -> bool:
            return self.view is not None or self.waiting is not notified

        while True:
            changed = self._wait(news, deadline - time.monotonic())
            self._check_running()
            if self.view is not None:
                return self.view
            notified = self.waiting
            if not changed:
                why = "ask the coordinator with `trireme status`"
                if notified is not None:
                    why = f"the job waits for {', '.join(notified[0].names)}"
                raise WaitTimeout(f"no view came within {timeout:g} s: {why}")
            if notified is not None and on_waiting is not None:
                on_waiting(notified[0].names, max(0.0, notified[1] - time.monotonic()))

    def wait_until_back(self, *, timeout: float) -> int:
        """Blocks until a worker that servers take for lost is in the newest view, perhaps anew."""

        def back() -> bool:
            me = WorkerEntry(self._config.index, self.incarnation)
            return self.view is not None and me in self.view.workers

        self._wait(back, timeout)
        self._check_running()
        if not back():
            raise WaitTimeout(
                f"{self._config.name} was taken for lost, and the coordinator at "
                f"{self._config.coordinator} did not admit it again within {timeout:g} s"
            )
        return self.incarnation

    def wait_until(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Blocks until a condition holds or `time.monotonic` is there; returns whether it does."""
        with self._changed:
            return self._changed.wait_for(condition, max(0.0, deadline - time.monotonic()))

    def tell(self, reports: Sequence[Message]) -> None:
        """Sets what this task reports beside its status; see `MemberProtocol.reports`."""
        with self.change():
            self.reports = tuple(reports)
        self._wakeup.wake()

    def signal(self, name: str, *, stops: bool) -> None:
        """Reports that a signal asks this process, or the job, to end. For signal handlers."""
        self.signalled = Signalled(name, stops)  # no lock, which this very thread may hold
        self._wakeup.wake()

    def leave(self, outcome: Outcome, reason: str = "", *, timeout: float = 5.0) -> bool:
        """Reports that this task ends, and how; returns whether the coordinator knows.

        `failed` ends the job. A member that has left still learns how the job ends.
        """
        with self.change():
            if self.leaving is None:
                text = reason.encode("utf-8", "replace").decode()  # what is no text cannot be sent
                self.leaving = Leave(outcome, text[:MAX_LINE])
        self._wakeup.wake()
        self._wait(lambda: self.left or not self.incarnation, timeout)
        return self.left or self.confirmed

    def close(self) -> None:
        """Ends the thread and its connection. A task that has not left is lost."""
        with self.change():
            self.closing = True
        self._wakeup.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            # An attempt to connect may take a little longer; then the thread ends by itself.
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._wakeup.close()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        return self.wait_until(
            lambda: condition() or self.over is not None or self.ended, time.monotonic() + seconds
        )

    def _check_running(self) -> None:
        self.check()
        if self.ended:
            raise ClusterError(
                f"{self._config.name} is no longer a member of the job: it has left or closed"
            )

    # In the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.finished:
                self._connect_once()
        except Exception as error:
            _log.exception("the membership of %s ends by an internal error", self._config.name)
            self.fail(error)
        finally:
            with self.change():
                self.ended = True

    def _connect_once(self) -> None:
        try:
            with self._connect() as connection:
                self._serve_connection(connection)
        except StaleEpochError as error:
            self.fail(error)  # the server denied this task after its proof
        except (AuthenticationError, FrameError, ConfigurationError) as error:
            if self.incarnation:
                # Another process may have the port of a coordinator that is gone.
                self._wait_to_reconnect(error)
            else:
                self.fail(error)
        except WireError as error:
            self._wait_to_reconnect(error)

    def _connect(self) -> Connection:
        config = self._config
        if self.incarnation and not self.able():
            raise WireTimeout(
                f"{config.name} does not join again while it cannot take part in the job"
            )
        left = self.reconnect_deadline - time.monotonic()
        timeout = max(0.01, min(ATTEMPT_SECONDS, left))
        stream = connect(config.coordinator, timeout=timeout, certificates=config.certificates)
        connection = Connection(stream, CLUSTER_CATALOG, limits=Limits(payload=0))
        identity = Identity(config.job, config.name, self.incarnation, self.epoch)
        authenticate(connection, identity, config.secret, server="coordinator:0", timeout=timeout)
        return connection

    def _wait_to_reconnect(self, error: WireError | ConfigurationError) -> None:
        """Waits before the next attempt to connect, or gives the coordinator up."""
        name = self._config.name
        if self.finished:
            return
        now = time.monotonic()
        if self.away_since is None:
            self._logged_at = now
            _log.warning("%s lost its coordinator: %s; connecting again", name, error)
        pause = self.broke(now, error)
        if pause is None:
            return
        if now - self._logged_at >= self._config.notice_interval:
            self._logged_at, left = now, self.reconnect_deadline - now
            if self.incarnation:
                _log.warning(
                    "%s has not reached its coordinator for %.0f s (%s): training goes on with the "
                    "servers within reach, and nobody joins or is replaced meanwhile. It tries for "
                    "%.0f s more (--rejoin-timeout)",
                    *(name, now - (self.away_since or now), error, left),
                )
            else:
                _log.info("%s waits for the coordinator, %.0f s more: %s", name, left, error)
        self._poll(pause)

    def _poll(self, seconds: float, connection: Connection | None = None) -> None:
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if connection is not None:
            events = select.POLLIN | (select.POLLOUT if connection.unsent else 0)
            poller.register(connection, events)
        poller.poll(1000 * max(0.0, seconds))
        self._wakeup.drain()

    def _serve_connection(self, connection: Connection) -> None:
        connection.offer(self.connected(time.monotonic()))
        while self._receive_all(connection):
            now = time.monotonic()
            try:
                for message in self.tick(now):
                    connection.offer(message)
            except WireError:
                self._receive_all(connection)  # what the coordinator sent before
                raise
            self._poll(self.due - now, connection)
            if connection.unsent:
                connection.flush()

    def _receive_all(self, connection: Connection) -> bool:
        while (incoming := connection.poll()) is not None:
            before = self.incarnation
            answer = self.heard(time.monotonic(), incoming.message)
            if answer is not None:
                connection.offer(answer)
            name, now = self._config.name, self.incarnation
            if before and isinstance(incoming.message, Joined):
                if before == now:
                    _log.info("%s is connected to its coordinator again", name)
                else:
                    news = "%s was given up while it was away: it goes on as incarnation %d"
                    _log.warning(news, name, now)
        return not self.served(time.monotonic())


@dataclass(frozen=True, slots=True)
class Observer:
    """Asks the coordinator of a job, over a new connection each time, as no member."""

    coordinator: str
    job: str
    secret: bytes
    certificates: Certificates | None = None
    timeout: float = 5.0

    def query_status(self) -> ClusterStatus:
        return self._ask(StatusQuery(), ClusterStatus)

    def scale(self, servers: int | None = None, workers: int | None = None) -> Scaled:
        """Asks for other numbers of tasks; None for as many as there are."""
        return self._ask(Scale(servers, workers), Scaled)

    def _ask(self, request: Message, expected: type[_Answer]) -> _Answer:
        stream = connect(self.coordinator, timeout=self.timeout, certificates=self.certificates)
        with Connection(stream, CLUSTER_CATALOG, limits=Limits(payload=0)) as connection:
            who, server = Identity(self.job, OBSERVER), "coordinator:0"
            authenticate(connection, who, self.secret, server=server, timeout=self.timeout)
            connection.send(request, sequence=1, timeout=self.timeout)
            answer = connection.receive(timeout=self.timeout).message
        if isinstance(answer, RequestRefused):
            raise ConfigurationError(f"the job is not scaled: {answer.reason}")
        if not isinstance(answer, expected):
            name = type(answer).__name__
            raise FrameError(f"{self.coordinator} answered a question with {name}")
        return answer

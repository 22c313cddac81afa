"""The loop of a member's thread, which keeps up the task's connection to the coordinator.

It connects, joins, sends heartbeats, stores what it receives in the member's state, and connects
again when the connection breaks. Between heartbeats it sleeps in `poll`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from trireme.cluster.member_state import MemberState
from trireme.cluster.messages import (
    CLUSTER_CATALOG,
    Heartbeat,
    HeartbeatHeard,
    JobOver,
    JobOverHeard,
    Join,
    Joined,
    Left,
    Refused,
    StopRequested,
    ViewChanged,
    WaitingFor,
)
from trireme.cluster.spec import task_name
from trireme.errors import (
    AuthenticationError,
    ClusterError,
    ConfigurationError,
    ConnectionRefused,
    ConnectTimeout,
    FrameError,
    StaleEpochError,
    TaskClaimedError,
    WireError,
    WireTimeout,
)
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Limits, Message
from trireme.wire.transport import connect

__all__ = ["MemberConfig", "MemberLoop"]

_log = logging.getLogger(__name__)

_LIMITS = Limits(payload=0)
_ATTEMPT_TIMEOUT = 5.0  # to connect, for each answer of the handshake, and to join
_RETRY_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.5)  # before each attempt; the last one repeats
_CLOSE_TIMEOUT = 1.0  # for the coordinator to close, once the job is over


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """Which task a member is, and where its coordinator listens. Times are in seconds.

    Attributes:
        coordinator: the coordinator's address, with its scheme.
        job: the job's id.
        role: `ps` or `worker`.
        index: the task's index.
        secret: the job's secret.
        address: the address at which this task listens, with its scheme; "" if it does not listen.
        connect_timeout: how long to try to join; the coordinator may start later than its tasks.
        coordinator_timeout: once joined, how long to go on while the coordinator is unreachable.
        notice_interval: how often to log that it is unreachable.
    """

    coordinator: str
    job: str
    role: str
    index: int
    secret: bytes
    address: str = ""
    connect_timeout: float = 60.0
    coordinator_timeout: float = 60.0
    notice_interval: float = 5.0

    @property
    def name(self) -> str:
        """The task's name, such as `ps:0`."""
        return task_name(self.role, self.index)


class MemberLoop:
    """The work of the member's thread. Other threads see its `MemberState`.

    Args:
        config: which task this is.
        state: the member's state, which is shared with other threads.
        wakeup: a socket that becomes readable when another thread has changed the state.
    """

    def __init__(self, config: MemberConfig, state: MemberState, wakeup: socket.socket) -> None:
        self._config = config
        self._state = state
        self._wakeup_reader = wakeup
        self._disconnected_since: float | None = time.monotonic()
        self._logged_at = time.monotonic()
        self._attempts = 0
        self._interval = 1.0
        self._answer_timeout = _ATTEMPT_TIMEOUT
        # The current connection:
        self._joined = False
        self._leave_sent = False
        self._next_heartbeat = 0.0
        self._unanswered_since: float | None = None  # since when an answer is due
        self._close_deadline: float | None = None  # until when the coordinator may close

    def run(self) -> None:
        """Runs until the job is over, the task has left, or the member is closing."""
        try:
            while not self._finished():
                self._connect_once()
        except Exception as error:
            _log.exception("the membership of %s ends by an internal error", self._config.name)
            self._fail(error)
        finally:
            with self._state.change():
                self._state.ended = True

    def _finished(self) -> bool:
        state = self._state
        return state.closing or state.left or state.over is not None

    # Connecting --------------------------------------------------------------------------------

    def _connect_once(self) -> None:
        try:
            with self._connect() as connection:
                self._serve_connection(connection)
        except StaleEpochError as error:
            self._fail(error)  # the server denied this task after its proof
        except (AuthenticationError, FrameError, ConfigurationError) as error:
            if self._state.incarnation:
                # Another process may have the port of a coordinator that is gone.
                self._wait_to_reconnect(error)
            else:
                self._fail(error)
        except WireError as error:
            self._wait_to_reconnect(error)

    def _connect(self) -> Connection:
        config = self._config
        timeout = max(0.01, min(_ATTEMPT_TIMEOUT, self._reconnect_deadline() - time.monotonic()))
        stream = connect(config.coordinator, timeout=timeout)
        connection = Connection(stream, CLUSTER_CATALOG, limits=_LIMITS)
        state = self._state
        identity = Identity(config.job, config.name, state.incarnation, state.epoch)
        authenticate(connection, identity, config.secret, server="coordinator:0", timeout=timeout)
        return connection

    def _reconnect_deadline(self) -> float:
        since = time.monotonic() if self._disconnected_since is None else self._disconnected_since
        joined = self._state.incarnation > 0
        return since + (
            self._config.coordinator_timeout if joined else self._config.connect_timeout
        )

    def _wait_to_reconnect(self, error: WireError | ConfigurationError) -> None:
        """Waits before the next attempt to connect, or gives the coordinator up."""
        if self._finished():
            return
        now = time.monotonic()
        if self._disconnected_since is None:
            self._disconnected_since = self._logged_at = now
            self._attempts = 0
            _log.warning("%s lost its coordinator: %s; connecting again", self._config.name, error)
        if now >= self._reconnect_deadline():
            self._give_up(now - self._disconnected_since, error)
            return
        if now - self._logged_at >= self._config.notice_interval:
            self._logged_at = now
            self._log_absence(now - self._disconnected_since, error)
        pause = _RETRY_SECONDS[min(self._attempts, len(_RETRY_SECONDS) - 1)]
        self._attempts += 1
        self._sleep(min(pause, self._reconnect_deadline() - now))

    def _log_absence(self, absence: float, error: Exception) -> None:
        left = self._reconnect_deadline() - time.monotonic()
        if self._state.incarnation:
            _log.warning(
                "the coordinator has been away for %.0f s (%s): training goes on with the present "
                "members; the job is given up in %.0f s",
                absence,
                error,
                left,
            )
        else:
            _log.info(
                "%s waits for the coordinator, %.0f s more: %s", self._config.name, left, error
            )

    def _give_up(self, absence: float, error: Exception) -> None:
        where = self._config.coordinator
        if self._state.incarnation:
            reason = f"nothing was heard of the coordinator at {where} for {absence:.0f} s: {error}"
            self._handle_end(JobOver("failed", "coordinator:0", reason), confirmed=False)
            return
        self._fail(
            ConnectTimeout(
                f"{self._config.name} could not reach the coordinator at {where} within "
                f"{absence:.0f} s: {error}. Check that the coordinator runs (ps:0 hosts it in a "
                "job started by hand), the address, and the firewall"
            )
        )

    def _sleep(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wakeup_reader, select.POLLIN)
        poller.poll(1000 * max(0.0, seconds))
        self._drain_wakeups()

    def _drain_wakeups(self) -> None:
        with suppress(BlockingIOError):
            self._wakeup_reader.recv(4096)

    # Sending and receiving ---------------------------------------------------------------------

    def _serve_connection(self, connection: Connection) -> None:
        """Sends and receives until there is nothing more to do, or the connection breaks.

        Raises:
            WireError: the connection broke.
        """
        self._send_join(connection)
        poller = select.poll()
        poller.register(self._wakeup_reader, select.POLLIN)
        while self._receive_all(connection):
            now = time.monotonic()
            try:
                self._send_due(connection, now)
            except WireError:
                self._receive_all(connection)  # what the coordinator sent before
                raise
            self._check_silence(connection, now)
            events = select.POLLIN | (select.POLLOUT if connection.wants_write else 0)
            poller.register(connection, events)
            poller.poll(1000 * max(0.0, self._next_deadline() - now))
            self._drain_wakeups()
            if connection.wants_write:
                connection.flush()

    def _send_join(self, connection: Connection) -> None:
        config = self._config
        self._joined = self._leave_sent = False
        self._close_deadline = None
        self._unanswered_since = time.monotonic()
        connection.offer(
            Join(
                role=config.role,
                index=config.index,
                incarnation=self._state.incarnation,
                host=socket.gethostname(),
                pid=os.getpid(),
                address=config.address,
                term=self._state.term,
            )
        )

    def _send_due(self, connection: Connection, now: float) -> None:
        if not self._joined or self._close_deadline is not None:
            return
        if self._state.leaving is not None and not self._leave_sent:
            self._leave_sent = True
            connection.offer(self._state.leaving)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._interval
            connection.offer(Heartbeat(self._state.status()))
            if self._unanswered_since is None:
                self._unanswered_since = now

    def _check_silence(self, connection: Connection, now: float) -> None:
        silence = 0.0 if self._unanswered_since is None else now - self._unanswered_since
        if self._unanswered_since is not None and silence >= self._answer_timeout:
            raise WireTimeout(
                f"{connection.peer} sent nothing for {silence:.0f} s: its process hangs, or the "
                "network is cut"
            )

    def _next_deadline(self) -> float:
        if self._close_deadline is not None:
            return self._close_deadline
        deadlines = [self._next_heartbeat] if self._joined else []
        if self._unanswered_since is not None:
            deadlines.append(self._unanswered_since + self._answer_timeout)
        return min(deadlines)

    def _receive_all(self, connection: Connection) -> bool:
        """Handles the messages that have arrived; returns whether to go on."""
        while (incoming := connection.poll()) is not None:
            self._handle(connection, incoming.message)
            if self._joined:
                self._unanswered_since = None
        finished = self._close_deadline is not None and time.monotonic() >= self._close_deadline
        return not (finished or self._state.closing)

    def _handle(self, connection: Connection, message: Message) -> None:
        state = self._state
        if isinstance(message, Joined):
            self._handle_joined(message)
        elif isinstance(message, Refused):
            self._handle_refused(message)
        elif isinstance(message, ViewChanged):
            if state.view is None or message.view.number > state.view.number:
                with state.change():
                    state.view, state.waiting = message.view, None
                state.publish(message.view)
        elif isinstance(message, WaitingFor):
            with state.change():
                state.waiting = (message, time.monotonic() + message.deadline_seconds)
        elif isinstance(message, StopRequested):
            with state.change():
                state.stop = message.reason
        elif isinstance(message, Left):
            with state.change():
                state.left = True
        elif isinstance(message, JobOver):
            self._handle_end(message, confirmed=True)
            self._close_deadline = time.monotonic() + _CLOSE_TIMEOUT
            connection.offer(JobOverHeard())
        elif not isinstance(message, HeartbeatHeard):
            raise FrameError(f"{connection.peer} sent {type(message).__name__} to a member")

    def _handle_joined(self, message: Joined) -> None:
        name, before = self._config.name, self._state.incarnation
        if before == message.incarnation:
            _log.info("%s is connected to its coordinator again", name)
        elif before:
            _log.warning(
                "%s was given up while it was away: it goes on as incarnation %d",
                name,
                message.incarnation,
            )
        self._joined = True
        self._disconnected_since = None
        self._interval = message.heartbeat_interval
        self._answer_timeout = message.heartbeat_timeout
        self._next_heartbeat = time.monotonic() + self._interval
        with self._state.change():
            self._state.epoch, self._state.term = message.epoch, message.term
            self._state.incarnation = message.incarnation

    def _handle_refused(self, message: Refused) -> None:
        if message.code == "deposed":
            raise ConnectionRefused(message.reason)  # its successor may listen soon
        kinds = {"outside": ConfigurationError, "unknown": ClusterError}
        self._fail(kinds.get(message.code, TaskClaimedError)(message.reason))
        self._close_deadline = time.monotonic()

    def _handle_end(self, over: JobOver, *, confirmed: bool) -> None:
        if self._state.over is not None:
            return
        with self._state.change():
            self._state.over, self._state.confirmed = over, confirmed
        self._state.publish(over)

    def _fail(self, error: Exception) -> None:
        """Ends the membership for a local reason. A thread that waits in `join` gets the error."""
        if not self._state.incarnation:
            with self._state.change():
                self._state.failure = error
        reason = f"the membership of {self._config.name} failed: {error}"
        self._handle_end(JobOver("failed", self._config.name, reason), confirmed=False)

"""One task's talk with the coordinator: the body of a member's thread.

It connects, joins, sends heartbeats, writes down what it hears on the board, and connects again
when the connection breaks. Otherwise it sleeps in `poll`: no work is done between heartbeats.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from trireme.cluster.board import Board
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

__all__ = ["Conversation", "MemberConfig"]

_log = logging.getLogger(__name__)

_LIMITS = Limits(payload=0)
_ATTEMPT_SECONDS = 5.0  # for one connection, for each answer of the handshake, and to be let in
_RETRY_SECONDS = (0.0, 0.05, 0.1, 0.2, 0.5)  # before each attempt; the last for all that follow
_FAREWELL_SECONDS = 1.0  # for the coordinator to close, once we know that the job is over


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """Who a task is and where its coordinator listens. Times are in seconds.

    Attributes:
        coordinator: the address, with its scheme.
        job: the job's id.
        role: `ps` or `worker`.
        index: the task's index.
        secret: the job's secret.
        address: where this task listens, with its scheme; "" if it does not.
        connect_timeout: how long to try to join; the coordinator may start later than its tasks.
        coordinator_timeout: once joined, how long to go on while the coordinator is gone.
        notice_interval: how often to log that it is not there.
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


class Conversation:
    """What one thread does; everybody else sees its `Board`.

    Args:
        config: who this task is.
        board: where to write what is heard, and to read what is to be said.
        bell: becomes readable when the board has something to say.
    """

    def __init__(self, config: MemberConfig, board: Board, bell: socket.socket) -> None:
        self._config = config
        self._board = board
        self._bell = bell
        self._away_since: float | None = time.monotonic()
        self._noticed = time.monotonic()
        self._attempts = 0
        self._interval = 1.0
        self._patience = _ATTEMPT_SECONDS
        # Of the connection that there is:
        self._joined = False
        self._leave_said = False
        self._next_beat = 0.0
        self._unanswered: float | None = None  # since when we wait for a word
        self._farewell: float | None = None  # until when we wait for the close

    def run(self) -> None:
        """Talks until the job is over, the task has left, or the board says to close."""
        try:
            while not self._finished():
                self._connect_once()
        except Exception as error:
            _log.exception("the membership of %s ends by an error of its own", self._config.name)
            self._fail(error)
        finally:
            with self._board.change():
                self._board.ended = True

    def _finished(self) -> bool:
        board = self._board
        return board.closing or board.left or board.over is not None

    # Connecting --------------------------------------------------------------------------------

    def _connect_once(self) -> None:
        try:
            with self._connect() as connection:
                self._talk(connection)
        except StaleEpochError as error:
            self._fail(error)  # whoever serves the job now has proven nothing, but we have
        except (AuthenticationError, FrameError, ConfigurationError) as error:
            if self._board.incarnation:
                self._be_away(error)  # the port of a coordinator that is gone may be another's
            else:
                self._fail(error)
        except WireError as error:
            self._be_away(error)

    def _connect(self) -> Connection:
        config = self._config
        timeout = max(0.01, min(_ATTEMPT_SECONDS, self._away_until() - time.monotonic()))
        stream = connect(config.coordinator, timeout=timeout)
        connection = Connection(stream, CLUSTER_CATALOG, limits=_LIMITS)
        board = self._board
        identity = Identity(config.job, config.name, board.incarnation, board.epoch)
        authenticate(connection, identity, config.secret, server="coordinator:0", timeout=timeout)
        return connection

    def _away_until(self) -> float:
        since = time.monotonic() if self._away_since is None else self._away_since
        joined = self._board.incarnation > 0
        return since + (
            self._config.coordinator_timeout if joined else self._config.connect_timeout
        )

    def _be_away(self, error: WireError | ConfigurationError) -> None:
        """Waits before the next attempt, or gives the coordinator up."""
        if self._finished():
            return
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = self._noticed = now
            self._attempts = 0
            _log.warning("%s lost its coordinator: %s; connecting again", self._config.name, error)
        if now >= self._away_until():
            self._give_up(now - self._away_since, error)
            return
        if now - self._noticed >= self._config.notice_interval:
            self._noticed = now
            self._complain(now - self._away_since, error)
        pause = _RETRY_SECONDS[min(self._attempts, len(_RETRY_SECONDS) - 1)]
        self._attempts += 1
        self._sleep(min(pause, self._away_until() - now))

    def _complain(self, away: float, error: Exception) -> None:
        left = self._away_until() - time.monotonic()
        if self._board.incarnation:
            _log.warning(
                "the coordinator has been away for %.0f s (%s): training goes on with the members "
                "that there are; the job is given up in %.0f s",
                away,
                error,
                left,
            )
        else:
            _log.info(
                "%s waits for the coordinator, %.0f s more: %s", self._config.name, left, error
            )

    def _give_up(self, away: float, error: Exception) -> None:
        where = self._config.coordinator
        if self._board.incarnation:
            reason = f"nothing was heard of the coordinator at {where} for {away:.0f} s: {error}"
            self._hear_end(JobOver("failed", "coordinator:0", reason), told=False)
            return
        self._fail(
            ConnectTimeout(
                f"{self._config.name} could not reach the coordinator at {where} within "
                f"{away:.0f} s: {error}. Check that the coordinator runs (ps:0 hosts it in a job "
                "started by hand), the address, and the firewall"
            )
        )

    def _sleep(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        poller.poll(1000 * max(0.0, seconds))
        self._hush()

    def _hush(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)

    # Talking -----------------------------------------------------------------------------------

    def _talk(self, connection: Connection) -> None:
        """Says and hears things until the connection breaks, which raises, or all is said."""
        self._introduce(connection)
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        while self._listen(connection):
            now = time.monotonic()
            try:
                self._speak(connection, now)
            except WireError:
                self._listen(connection)  # what the coordinator said before it went away
                raise
            self._check_silence(connection, now)
            events = select.POLLIN | (select.POLLOUT if connection.wants_write else 0)
            poller.register(connection, events)
            poller.poll(1000 * max(0.0, self._next_deadline() - now))
            self._hush()
            if connection.wants_write:
                connection.flush()

    def _introduce(self, connection: Connection) -> None:
        config = self._config
        self._joined = self._leave_said = False
        self._farewell = None
        self._unanswered = time.monotonic()
        connection.offer(
            Join(
                role=config.role,
                index=config.index,
                incarnation=self._board.incarnation,
                host=socket.gethostname(),
                pid=os.getpid(),
                address=config.address,
                term=self._board.term,
            )
        )

    def _speak(self, connection: Connection, now: float) -> None:
        if not self._joined or self._farewell is not None:
            return
        if self._board.leaving is not None and not self._leave_said:
            self._leave_said = True
            connection.offer(self._board.leaving)
        if now >= self._next_beat:
            self._next_beat = now + self._interval
            connection.offer(Heartbeat(self._board.status()))
            if self._unanswered is None:
                self._unanswered = now

    def _check_silence(self, connection: Connection, now: float) -> None:
        if self._unanswered is not None and now - self._unanswered >= self._patience:
            raise WireTimeout(
                f"{connection.peer} said nothing for {now - self._unanswered:.0f} s: its process "
                "hangs, or the network is cut"
            )

    def _next_deadline(self) -> float:
        if self._farewell is not None:
            return self._farewell
        deadlines = [self._next_beat] if self._joined else []
        if self._unanswered is not None:
            deadlines.append(self._unanswered + self._patience)
        return min(deadlines)

    def _listen(self, connection: Connection) -> bool:
        """Takes in what has come; returns whether to go on."""
        while (incoming := connection.poll()) is not None:
            self._hear(connection, incoming.message)
            if self._joined:
                self._unanswered = None
        said_all = self._farewell is not None and time.monotonic() >= self._farewell
        return not (said_all or self._board.closing)

    def _hear(self, connection: Connection, message: Message) -> None:
        board = self._board
        if isinstance(message, Joined):
            self._hear_joined(message)
        elif isinstance(message, Refused):
            self._hear_refused(message)
        elif isinstance(message, ViewChanged):
            if board.view is None or message.view.number > board.view.number:
                with board.change():
                    board.view, board.waiting = message.view, None
                board.publish(message.view)
        elif isinstance(message, WaitingFor):
            with board.change():
                board.waiting = (message, time.monotonic() + message.deadline_seconds)
        elif isinstance(message, StopRequested):
            with board.change():
                board.stop = message.reason
        elif isinstance(message, Left):
            with board.change():
                board.left = True
        elif isinstance(message, JobOver):
            self._hear_end(message, told=True)
            self._farewell = time.monotonic() + _FAREWELL_SECONDS
            connection.offer(JobOverHeard())
        elif not isinstance(message, HeartbeatHeard):
            raise FrameError(f"{connection.peer} sent {type(message).__name__} to a member")

    def _hear_joined(self, message: Joined) -> None:
        name, before = self._config.name, self._board.incarnation
        if before == message.incarnation:
            _log.info("%s is connected to its coordinator again", name)
        elif before:
            _log.warning(
                "%s was given up while it was away: it goes on as incarnation %d",
                name,
                message.incarnation,
            )
        self._joined = True
        self._away_since = None
        self._interval = message.heartbeat_interval
        self._patience = message.heartbeat_timeout
        self._next_beat = time.monotonic() + self._interval
        with self._board.change():
            self._board.epoch, self._board.term = message.epoch, message.term
            self._board.incarnation = message.incarnation

    def _hear_refused(self, message: Refused) -> None:
        if message.code == "deposed":
            raise ConnectionRefused(message.reason)  # its successor may be there soon
        kinds = {"outside": ConfigurationError, "unknown": ClusterError}
        self._fail(kinds.get(message.code, TaskClaimedError)(message.reason))
        self._farewell = time.monotonic()

    def _hear_end(self, over: JobOver, *, told: bool) -> None:
        if self._board.over is not None:
            return
        with self._board.change():
            self._board.over, self._board.told = over, told
        self._board.publish(over)

    def _fail(self, error: Exception) -> None:
        """Ends the talk for a reason of this side's; whoever waits to have joined is told it."""
        if not self._board.incarnation:
            with self._board.change():
                self._board.failure = error
        reason = f"the membership of {self._config.name} failed: {error}"
        self._hear_end(JobOver("failed", self._config.name, reason), told=False)

"""The loop of a member's thread, which keeps up the task's connection to the coordinator.

It connects, carries the messages of a `MemberProtocol`, and connects again when the connection
breaks. Between messages it sleeps in `poll`.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time

from trireme.cluster.member_protocol import ATTEMPT_SECONDS, MemberConfig, MemberProtocol
from trireme.cluster.member_state import MemberState
from trireme.cluster.messages import CLUSTER_CATALOG, Joined
from trireme.errors import (
    AuthenticationError,
    ConfigurationError,
    FrameError,
    StaleEpochError,
    WireError,
)
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Limits, Message
from trireme.wire.polling import Wakeup
from trireme.wire.transport import connect

__all__ = ["MemberLoop"]

_log = logging.getLogger(__name__)

_LIMITS = Limits(payload=0)


class MemberLoop:
    """The work of the member's thread. Other threads see its `MemberState`.

    Args:
        config: which task this is.
        state: the member's state, which is shared with other threads.
        wakeup: woken when another thread has changed the state.
    """

    def __init__(self, config: MemberConfig, state: MemberState, wakeup: Wakeup) -> None:
        now = time.monotonic()
        self._config = config
        self._state = state
        self._wakeup = wakeup
        self._protocol = MemberProtocol(config, state, now, socket.gethostname(), os.getpid())
        self._logged_at = now

    def run(self) -> None:
        """Runs until the job is over, the task has left, or the member is closing."""
        try:
            while not self._protocol.finished:
                self._connect_once()
        except Exception as error:
            _log.exception("the membership of %s ends by an internal error", self._config.name)
            self._protocol.fail(error)
        finally:
            with self._state.change():
                self._state.ended = True

    # Connecting --------------------------------------------------------------------------------

    def _connect_once(self) -> None:
        try:
            with self._connect() as connection:
                self._serve_connection(connection)
        except StaleEpochError as error:
            self._protocol.fail(error)  # the server denied this task after its proof
        except (AuthenticationError, FrameError, ConfigurationError) as error:
            if self._state.incarnation:
                # Another process may have the port of a coordinator that is gone.
                self._wait_to_reconnect(error)
            else:
                self._protocol.fail(error)
        except WireError as error:
            self._wait_to_reconnect(error)

    def _connect(self) -> Connection:
        config = self._config
        left = self._protocol.reconnect_deadline - time.monotonic()
        timeout = max(0.01, min(ATTEMPT_SECONDS, left))
        stream = connect(config.coordinator, timeout=timeout)
        connection = Connection(stream, CLUSTER_CATALOG, limits=_LIMITS)
        state = self._state
        identity = Identity(config.job, config.name, state.incarnation, state.epoch)
        authenticate(connection, identity, config.secret, server="coordinator:0", timeout=timeout)
        return connection

    def _wait_to_reconnect(self, error: WireError | ConfigurationError) -> None:
        """Waits before the next attempt to connect, or gives the coordinator up."""
        protocol = self._protocol
        if protocol.finished:
            return
        now = time.monotonic()
        if protocol.away_since is None:
            self._logged_at = now
            _log.warning("%s lost its coordinator: %s; connecting again", self._config.name, error)
        pause = protocol.broke(now, error)
        if pause is None:
            return
        if now - self._logged_at >= self._config.notice_interval:
            self._logged_at = now
            self._log_absence(now, error)
        self._sleep(pause)

    def _log_absence(self, now: float, error: Exception) -> None:
        left = self._protocol.reconnect_deadline - now
        if self._state.incarnation:
            _log.warning(
                "the coordinator has been away for %.0f s (%s): training goes on with the present "
                "members; the job is given up in %.0f s",
                now - (self._protocol.away_since or now),
                error,
                left,
            )
        else:
            _log.info(
                "%s waits for the coordinator, %.0f s more: %s", self._config.name, left, error
            )

    def _sleep(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        poller.poll(1000 * max(0.0, seconds))
        self._wakeup.drain()

    # Sending and receiving ---------------------------------------------------------------------

    def _serve_connection(self, connection: Connection) -> None:
        """Sends and receives until there is nothing more to do, or the connection breaks.

        Raises:
            WireError: the connection broke.
        """
        connection.offer(self._protocol.connected(time.monotonic()))
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        while self._receive_all(connection):
            now = time.monotonic()
            try:
                for message in self._protocol.tick(now):
                    connection.offer(message)
            except WireError:
                self._receive_all(connection)  # what the coordinator sent before
                raise
            events = select.POLLIN | (select.POLLOUT if connection.wants_write else 0)
            poller.register(connection, events)
            poller.poll(1000 * max(0.0, self._protocol.due - now))
            self._wakeup.drain()
            if connection.wants_write:
                connection.flush()

    def _receive_all(self, connection: Connection) -> bool:
        """Handles the messages that have arrived; returns whether to go on."""
        while (incoming := connection.poll()) is not None:
            self._handle(connection, incoming.message)
        return not self._protocol.served(time.monotonic())

    def _handle(self, connection: Connection, message: Message) -> None:
        before = self._state.incarnation
        answer = self._protocol.heard(time.monotonic(), message)
        if answer is not None:
            connection.offer(answer)
        if isinstance(message, Joined):
            self._log_joined(before, message.incarnation)

    def _log_joined(self, before: int, incarnation: int) -> None:
        name = self._config.name
        if before == incarnation:
            _log.info("%s is connected to its coordinator again", name)
        elif before:
            _log.warning(
                "%s was given up while it was away: it goes on as incarnation %d", name, incarnation
            )

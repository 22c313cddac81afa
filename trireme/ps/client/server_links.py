"""A worker's connections to the servers, which carry out the instructions of its `Lanes`.

The lanes decide which requests are sent when, and which answers count. The connections do what
takes time: connect, authenticate, send, and wait for messages.
"""

from __future__ import annotations

import logging
import math
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from trireme.certificates import Certificates
from trireme.cluster.view import ServerEntry, View
from trireme.errors import (
    AuthenticationError,
    ConnectionBroken,
    FrameError,
    StaleEpochError,
    WireError,
    WireTimeout,
)
from trireme.ps.client.lanes import Answer, Lane, Lanes, Request, Transmit
from trireme.ps.lending_messages import LendExtra, LendMemory, MemoryLent
from trireme.ps.lent_memory import LENT_BYTES, LentMemory
from trireme.ps.messages import PulledExtra, PullExtra, Push, PushReply
from trireme.ps.replication.messages import PS_CATALOG, ConnectToShard
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import HANDSHAKE_TIMEOUT, Identity, authenticate
from trireme.wire.message import Message
from trireme.wire.polling import SpinWait
from trireme.wire.shared_memory import SharedMemory
from trireme.wire.transport import Stream, connect, local_memory

_log = logging.getLogger(__name__)

SLICE = 0.1
"""Seconds between two looks at whether the job is over, and has another view."""


class Membership(Protocol):
    """Knows the servers, and whether the job still runs."""

    @property
    def view(self) -> View | None:
        """The newest view."""

    def check(self) -> None:
        """Returns while the job runs.

        Raises:
            JobFailed: it has ended; says who ended it, and why.
        """


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The identity of a client, and its timeouts."""

    job: str  # the job's id
    secret: bytes = field(repr=False)  # the job's
    worker: int  # the worker's index
    incarnation: int  # the worker's incarnation
    epoch: str = ""  # the job's epoch
    # how long a server may refuse connections, or break them off, before that is an error
    retry_seconds: float = 30.0
    rejoin_seconds: float = 600.0  # how long a server may be out of reach before that is an error
    # how long an answer may be withheld, for instance until a slow worker's update is in, before
    # that is an error
    patience_seconds: float = 1800.0
    share_memory: bool = True  # whether to lend memory to servers of this host
    # is called with the reason for a withheld answer, or why servers are out of reach; with the
    # tasks that it waits for; and with the seconds so far
    waiting: Callable[[str, Sequence[str], float], None] = lambda *notice: None
    # returns whether this worker is asked to stop: then a server that is out of reach is given up
    # sooner
    hurries: Callable[[], bool] = lambda: False
    certificates: Certificates | None = None  # the task's, where the job uses TLS


@dataclass(frozen=True)
class SharedBuffer:
    """Memory that a worker lends to a server of its host: gradients to read, values to write."""

    memory: SharedMemory  # contains both
    outbound: tuple[memoryview, ...]  # the gradients
    inbound: tuple[memoryview, ...]  # the values

    def offer(self, connection: Connection, stream: Stream, *, extra: bool, timeout: float) -> bool:
        """Lends the memory to the server: what lies there need not cross the socket.

        Args:
            timeout: in seconds, to send the offer and again to hear the answer.

        Returns:
            Whether the server uses it; if not, everything crosses the socket.

        Raises:
            WireError: the connection failed, or there was no answer in time.
        """
        stream.pass_descriptor(self.memory.fileno())
        outbound, inbound = (
            tuple(self.memory.place_of(view) for view in views)
            for views in (self.outbound, self.inbound)
        )
        offered = LendMemory(self.memory.nbytes, outbound, inbound, extra)
        connection.send(offered, timeout=timeout)
        local = local_memory()
        accepted = _accepts(connection, timeout) and local is not None
        if local is not None and accepted:
            connection.lending = local.lend(self.inbound, self.outbound, borrowed=False)
        return accepted


class ServerLink:
    """The connection to the primary of one shard, while there is one."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.connection: Connection | None = None
        self.server: ServerEntry | None = None  # at the other end
        self.trusts_memory = True  # until another process was found at the address of its socket
        self.lent: LentMemory | None = None  # over the connection, for extra values

    def close(self) -> None:
        """Closes the connection, if there is one. May be repeated."""
        if self.connection is not None:
            self.connection.close()
            self.connection = self.lent = None


class ServerLinks:
    """A worker's connections to the primaries of all shards. Used by one thread.

    Args:
        destination: returns the memory for a payload of so many bytes that comes from a shard with
            a message.
    """

    def __init__(
        self,
        options: ClientOptions,
        membership: Membership,
        servers: int,
        destination: Callable[[int, Message, int], Sequence[memoryview]],
    ) -> None:
        # may be replaced while no request is under way, once the connections are closed
        self.options = options
        # decides what is sent when
        self.lanes = Lanes(
            options.worker,
            options.incarnation,
            servers,
            lambda: membership.view,
            retry_seconds=options.retry_seconds,
            rejoin_seconds=options.rejoin_seconds,
            patience_seconds=options.patience_seconds,
            waiting=lambda note: self.options.waiting(note.reason, note.names, note.seconds),
            hurries=options.hurries,
        )
        self.links = [ServerLink(server) for server in range(servers)]  # the connections, by shard
        # the memory to lend for each shard to a server of this host; empty for none
        self.shared_buffers: Sequence[SharedBuffer] = ()
        self.lends_extra = False  # whether memory is lent for extra values too
        # An answer through memory has mostly come by then. Workers that sleep until a round is over
        # wake together, often on one core: the system takes milliseconds to part them.
        self._spin = SpinWait(least=0.0005, most=0.005, share=0.25)
        self._membership = membership
        self._destination = destination
        self._seen: View | None = None  # the newest view that connections were compared with

    def close(self) -> None:
        """Closes all connections; the next request connects again. May be repeated."""
        for link in self.links:
            link.close()

    def divide(self, shards: int) -> None:
        """Begins anew with other shards; see `Lanes.divide`."""
        self.close()
        self.links = [ServerLink(shard) for shard in range(shards)]
        self.lanes.divide(shards)

    def space(self, shard: int, nbytes: int) -> memoryview:
        """Returns memory for extra values that the next request sends to a shard."""
        lent = self.links[shard].lent
        found = None if lent is None else lent.space(nbytes)
        return memoryview(bytearray(nbytes)) if found is None else found

    def ask(self, requests: Mapping[int, Request], *, again: bool = True) -> None:
        """Sends a request to each of several servers; see `Lanes.ask`.

        Raises:
            AuthenticationError: a server does not know this job's secret.
            WaitTimeout: there is no view of the cluster yet.
            JobFailed: the job is over, or a server is not part of it any longer.
            WireError: a server has been out of reach too long.
        """
        for order in self.lanes.ask(time.monotonic(), requests, again=again):
            self._transmit(order)

    def finish(self) -> Mapping[int, Answer]:
        """Waits for the answers of all servers that were asked.

        Requests are sent again meanwhile where they must be: a server may withhold its answer until
        another one has the request that was lost, or fenced off, on the way.

        Raises:
            Fenced: this worker was replaced, or taken out of the job.
            Rejected: a server has refused the request, as it makes no sense.
            ModelMismatchError, UnsupportedOptimizerError: this worker's model does not fit.
            WaitTimeout: the answer was withheld too long; names those it was withheld for.
            JobFailed: the job ended meanwhile.
            WireError: a server was out of reach too long.
        """
        lanes = self.lanes
        lanes.wait(time.monotonic())
        while waiting := lanes.waiting:
            alone = len(waiting) == 1
            heard = False
            for lane in tuple(waiting):
                heard = self._receive(lane, sleeps=alone) or heard
            if not heard and not self._readable(lanes.waiting):
                for order in lanes.tick(time.monotonic()):
                    self._transmit(order)
                self._membership.check()
                self._leave_replaced()
        return lanes.answers

    def is_replaced(self, link: ServerLink) -> bool:
        """Returns whether the server at the other end is not the primary of its shard any longer.

        Any thread may ask.
        """
        view = self._membership.view
        if view is None or view.generation != self.lanes.generation:
            return view is not None
        return view.server(view.primary(link.index)) != link.server

    def _leave_replaced(self) -> None:
        """Closes the connections to primaries that a view has replaced: they cannot answer."""
        view = self._membership.view
        if view is self._seen:
            return
        self._seen = view
        for lane in [*self.lanes.waiting]:
            link = self.links[lane.index]
            if link.connection is not None and link.server != self.lanes.entry(lane.index):
                error = ConnectionBroken(f"{link.connection.peer} is not the primary any longer")
                self._broke(lane.index, error)

    def _receive(self, lane: Lane, *, sleeps: bool) -> bool:
        """Takes a message of a server, if there is one; returns whether anything has happened."""
        connection = self.links[lane.index].connection
        if connection is None:
            return False
        try:
            if sleeps:
                timeout = SLICE if lane.due == math.inf else self._slice()
                incoming: Incoming | None = connection.receive(timeout=timeout)
            else:
                incoming = connection.poll()
        except WireTimeout:
            return False  # only in connecting and sending it is a failure
        except FrameError:
            raise
        except WireError as error:
            self._membership.check()
            self._broke(lane.index, error)
            return True
        if incoming is None:
            return False
        now, message, payload = time.monotonic(), incoming.message, incoming.payload
        lent = self.links[lane.index].lent
        if lent is not None and isinstance(message, PushReply | PulledExtra) and message.extra:
            message = replace(message, extra=lent.received(message.extra))
        self.lanes.heard(now, lane.index, incoming.sequence, message, payload)
        if lane.request is not None:  # a notice, or another view: the job may be over
            self._membership.check()
        return True

    def _slice(self) -> float:
        """Returns how many seconds to wait for connections at most."""
        return max(0.0, min(SLICE, self.lanes.due - time.monotonic()))

    def _readable(self, waiting: Sequence[Lane]) -> bool:
        """Waits a little for something to read; returns whether there is.

        If all connections are through memory, it spins first. For one alone, `_receive` has waited.
        """
        made = [self.links[lane.index].connection for lane in waiting]
        connections = [connection for connection in made if connection is not None]
        if len(made) == len(connections) == 1:
            return False
        if any(connection.stream.pending for connection in connections):
            return True
        poller = select.poll()
        for connection in connections:
            poller.register(connection, select.POLLIN)
        through_memory = bool(made) and all([c is not None and c.spin is not None for c in made])
        return self._spin.wait(poller.poll, self._slice(), look=through_memory)

    def _transmit(self, order: Transmit) -> None:
        link = self.links[order.shard]
        try:
            if link.connection is not None and link.server != self.lanes.entry(link.index):
                link.close()  # another server has the primary now
            connection, message = link.connection or self._connect(link), order.message
            if link.lent is not None and isinstance(message, Push | PullExtra) and message.extra:
                message = replace(message, extra=link.lent.sent(message.extra))
            connection.send(
                message,
                order.payload,
                sequence=order.sequence,
                timeout=self.options.retry_seconds,
                check=partial(self._check_primary, link),
            )
        except (AuthenticationError, FrameError):
            raise
        except WireError as error:
            self._broke(order.shard, error)

    def _check_primary(self, link: ServerLink) -> None:
        """Checks that what is being sent over a connection still has somewhere to arrive.

        A server that was stopped takes nothing, and need not be waited for once another one has its
        place.
        """
        self._membership.check()
        if self.is_replaced(link):
            raise ConnectionBroken("it is not the primary any longer")

    def _broke(self, server: int, error: WireError) -> None:
        """Closes a connection that failed: its request is sent again, or given up."""
        self.links[server].close()
        self.lanes.broke(time.monotonic(), server, error)

    def _connect(self, link: ServerLink) -> Connection:
        """Connects to a server of the newest view, through memory where possible."""
        entry = self.lanes.entry(link.index)
        connection = self._connect_by_memory(link, entry)
        if connection is None:
            stream = connect(
                entry.address,
                timeout=min(5.0, self.options.retry_seconds),
                certificates=self.options.certificates,
            )
            connection = self._introduce(link, entry, stream)
        link.connection, link.server = connection, entry
        return connection

    def _connect_by_memory(self, link: ServerLink, entry: ServerEntry) -> Connection | None:
        """Connects through memory to a server of this host; returns None where that cannot be.

        Any process of this host may have taken the name of the server's socket. It gets no messages
        and no memory, and the worker connects to the server over TCP.
        """
        local = local_memory()
        if local is None or not self.shared_buffers or not link.trusts_memory:
            return None
        stream: Stream | None = None
        try:
            stream = connect(local.address(entry.address), timeout=1.0)
            return self._introduce(link, entry, stream)
        except StaleEpochError:
            raise
        except AuthenticationError as error:
            link.trusts_memory = False
            who = f"worker:{self.options.worker}"
            _log.warning("%s goes on over TCP to ps:%d: %s", who, entry.index, error)
        except WireError:
            if stream is not None:
                raise
        return None

    def _introduce(self, link: ServerLink, entry: ServerEntry, stream: Stream) -> Connection:
        """Returns a connection whose ends have authenticated each other."""
        options = self.options
        connection = Connection(stream, PS_CATALOG)
        connection.peer = f"ps:{entry.index} at {entry.address}"
        connection.destination = partial(self._destination, link.index)
        try:
            task, server = f"worker:{options.worker}", f"ps:{entry.index}"
            identity = Identity(options.job, task, options.incarnation, options.epoch)
            patience = min(HANDSHAKE_TIMEOUT, options.retry_seconds)
            authenticate(connection, identity, options.secret, server=server, timeout=patience)
            address = ConnectToShard(link.index, self.lanes.generation or 0)
            connection.send(address, timeout=options.retry_seconds)
            if stream.passes_descriptors:
                shared_buffer = self.shared_buffers[link.index]
                patience, extra = options.retry_seconds, self.lends_extra
                if shared_buffer.offer(connection, stream, extra=extra, timeout=patience):
                    connection.spin = self._spin
                    link.lent = self._lend_extra(connection, stream, patience) if extra else None
        except BaseException:
            connection.close()
            raise
        return connection

    def _lend_extra(
        self, connection: Connection, stream: Stream, timeout: float
    ) -> LentMemory | None:
        """Lends memory for extra values; returns None where the server has no use of it.

        Raises:
            WireError: the connection failed, or there was no answer in time.
        """
        local = local_memory()
        assert local is not None  # as the connection is through it
        try:
            memory = local.create(LENT_BYTES)
        except OSError as error:
            _log.warning("there is no memory to lend for extra values: %s", error)
            return None
        try:
            stream.pass_descriptor(memory.fileno())
            connection.send(LendExtra(memory.nbytes), timeout=timeout)
            lent = _accepts(connection, timeout)
        finally:
            memory.close()
        return LentMemory(memory) if lent else None


def _accepts(connection: Connection, timeout: float) -> bool:
    """Returns whether the server uses memory that was offered."""
    answer = connection.receive(timeout=timeout).message
    return isinstance(answer, MemoryLent) and answer.accepted

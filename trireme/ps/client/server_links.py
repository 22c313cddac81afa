"""A worker's connections to the servers, which carry out the instructions of its `Lanes`."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from trireme.cluster.view import ServerEntry, View
from trireme.errors import (
    AuthenticationError,
    ConnectionBroken,
    FrameError,
    StaleEpochError,
    WireError,
)
from trireme.ps.client.lanes import Answer, ClientOptions, Lane, Lanes, Transmit
from trireme.ps.dialing import dial
from trireme.ps.extra import LentMemory
from trireme.ps.lending_messages import LendExtra, LendMemory, MemoryLent
from trireme.ps.messages import PulledExtra, PullExtra, Push, PushReply
from trireme.ps.replication.messages import ConnectToShard
from trireme.wire.connection import Connection, Incoming
from trireme.wire.message import Message
from trireme.wire.polling import SpinWait
from trireme.wire.shared_memory import LocalMemory, SharedMemory
from trireme.wire.transport import local_memory

_log = logging.getLogger(__name__)

_LENT_BYTES = 1 << 28  # for extra values; the system gives pages when they are first used

SLICE = 0.1  # seconds between two looks at whether the job is over, and has another view


class Membership(Protocol):
    """Knows the servers, and whether the job still runs."""

    @property
    def view(self) -> View | None:
        """The newest view."""

    def check(self) -> None:
        """Returns while the job runs; raises `JobFailed` when it has ended."""


@dataclass(frozen=True)
class SharedBuffer:
    """Memory that a worker lends to a server of its host: gradients to read, values to write."""

    memory: SharedMemory  # contains both
    outbound: tuple[memoryview, ...]  # the gradients
    inbound: tuple[memoryview, ...]  # the values


class ServerLink:
    """The connection to the primary of one shard, while there is one."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.connection: Connection | None = None
        self.server: ServerEntry | None = None  # at the other end
        self.trusts_memory = True  # until another process was found at the address of its socket
        self.lent: LentMemory | None = None  # over the connection, for extra values

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = self.lent = None


class ServerLinks:
    """A worker's connections to the primaries of all shards. Used by one thread."""

    def __init__(
        self,
        options: ClientOptions,
        membership: Membership,
        shards: int,
        destination: Callable[[int, Message, int], Sequence[memoryview]],
    ) -> None:
        # decides what is sent when
        self.lanes = Lanes(options, shards, lambda: membership.view)
        self.links = [ServerLink(shard) for shard in range(shards)]  # the connections, by shard
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
        """Closes all connections; the next request connects again."""
        for link in self.links:
            self._leave(link)

    def divide(self, shards: int) -> None:
        self.close()
        self.links = [ServerLink(shard) for shard in range(shards)]
        self.lanes.divide(shards)

    def space(self, shard: int, nbytes: int) -> memoryview:
        """Returns memory for extra values that the next request sends to a shard."""
        lent = self.links[shard].lent
        found = None if lent is None else lent.space(nbytes)
        return memoryview(bytearray(nbytes)) if found is None else found

    def transmit(self, orders: Iterable[Transmit]) -> None:
        """Sends messages, over new connections where there are none."""
        for order in orders:
            link, message = self.links[order.shard], order.message
            try:
                if link.connection is not None and link.server != self.lanes.entry(link.index):
                    self._leave(link)  # another server has the primary now
                connection = link.connection or self._connect(link)
                if link.lent is not None and isinstance(message, Push | PullExtra):
                    message = msgspec.structs.replace(message, extra=link.lent.sent(message.extra))
                sequence, payload = order.sequence, order.payload
                if not connection.offer(message, payload, sequence=sequence, copies=False):
                    seconds = self.lanes.options.retry_seconds
                    connection.drain(timeout=seconds, check=partial(self._check_primary, link))
            except (AuthenticationError, FrameError):
                raise
            except WireError as error:
                self._broke(order.shard, error)

    def finish(self) -> Mapping[int, Answer]:
        """Waits for the answers of all servers that were asked.

        Requests are sent again meanwhile where they must be: a server may withhold its answer until
        another one has the request that was lost, or fenced off, on the way.
        """
        lanes, heard = self.lanes, False
        lanes.wait(time.monotonic())
        while waiting := lanes.waiting:
            # What came with a message that was heard may be in memory already.
            if not heard and not self._readable(waiting):
                self.transmit(lanes.tick(time.monotonic()))
                self._membership.check()
                self._leave_replaced()
            heard = False
            for lane in tuple(lanes.waiting):
                connection = self.links[lane.index].connection
                if connection is None:
                    continue
                try:
                    incoming = connection.poll()
                except FrameError:
                    raise
                except WireError as error:
                    self._membership.check()
                    self._broke(lane.index, error)
                    continue
                if incoming is not None:
                    self._heard(lane, incoming)
                    heard = True
        return lanes.answers

    def is_replaced(self, link: ServerLink) -> bool:
        """Returns whether the server at the other end is not the primary any longer."""
        view = self._membership.view
        if view is None or view.generation != self.lanes.generation:
            return view is not None
        return view.server(view.primary(link.index)) != link.server

    def _leave_replaced(self) -> None:
        """Closes the connections to primaries that a view has replaced: they cannot answer."""
        if self._membership.view is self._seen:
            return
        self._seen = self._membership.view
        for lane in tuple(self.lanes.waiting):
            link = self.links[lane.index]
            if link.connection is not None and link.server != self.lanes.entry(lane.index):
                error = ConnectionBroken(f"{link.connection.peer} is not the primary any longer")
                self._broke(lane.index, error)

    def _heard(self, lane: Lane, incoming: Incoming) -> None:
        message, lent = incoming.message, self.links[lane.index].lent
        if lent is not None and isinstance(message, PushReply | PulledExtra) and message.extra:
            message = msgspec.structs.replace(message, extra=lent.received(message.extra))
        self.lanes.heard(time.monotonic(), lane.index, incoming.sequence, message, incoming.payload)
        if lane.request is not None:  # a notice, or another view: the job may be over
            self._membership.check()

    def _readable(self, waiting: Sequence[Lane]) -> bool:
        """Waits a little for something to read; spins first if all goes through memory."""
        seconds = max(0.0, min(SLICE, self.lanes.due - time.monotonic()))
        made = [self.links[lane.index].connection for lane in waiting]
        connections = [connection for connection in made if connection is not None]
        if len(made) == len(connections) == 1:
            return connections[0].wait(seconds)
        if any(connection.stream.pending for connection in connections):
            return True
        poller = select.poll()
        for connection in connections:
            poller.register(connection, select.POLLIN)
        through_memory = bool(made) and all([c is not None and c.spin is not None for c in made])
        return self._spin.wait(poller.poll, seconds, look=through_memory)

    def _check_primary(self, link: ServerLink) -> None:
        """Checks that what is being sent can still arrive: a stopped server takes nothing."""
        self._membership.check()
        if self.is_replaced(link):
            raise ConnectionBroken("it is not the primary any longer")

    def _broke(self, shard: int, error: WireError) -> None:
        """Closes a connection that failed: its request is sent again, or given up."""
        self._leave(self.links[shard])
        self.lanes.broke(time.monotonic(), shard, error)

    def _leave(self, link: ServerLink) -> None:
        """Closes a connection, and moves the memory that was lent over it.

        A server that was stopped writes its answer when it wakes. It writes to the old memory,
        which no worker reads; the worker lends the new memory to all servers when it connects.
        """
        lent = [each for each in self.links if each.connection and each.connection.lending]
        link.close()
        if link not in lent:
            return
        for other in lent:
            other.close()
            if other is not link:
                error = ConnectionBroken("the memory that was lent over it has moved")
                self.lanes.broke(time.monotonic(), other.index, error)
        for shared in self.shared_buffers[:1]:  # all shards lie in one memory
            if shared.memory.moves:
                shared.memory.move()

    def _connect(self, link: ServerLink) -> Connection:
        """Connects to a server of the newest view, through memory where possible.

        Any process of this host may have taken the name of the server's socket. It gets no messages
        and no memory, and the worker connects to the server over TCP.
        """
        options, entry = self.lanes.options, self.lanes.entry(link.index)
        reach = partial(
            dial,
            entry,
            options.identity,
            options.secret,
            seconds=options.retry_seconds,
            certificates=options.certificates,
        )
        local = bool(self.shared_buffers) and link.trusts_memory
        try:
            connection = reach(local=local)
        except AuthenticationError as error:
            if not local or isinstance(error, StaleEpochError):
                raise
            link.trusts_memory = False
            task = options.identity.task
            _log.warning("%s goes on over TCP to ps:%d: %s", task, entry.index, error)
            connection = reach(local=False)
        connection.destination = partial(self._destination, link.index)
        memory = local_memory() if connection.stream.passes_descriptors else None
        try:
            address = ConnectToShard(link.index, self.lanes.generation or 0)
            connection.send(address, timeout=options.retry_seconds)
            if memory is not None:
                self._lend(link, connection, memory)
        except BaseException:
            connection.close()
            raise
        link.connection, link.server = connection, entry
        return connection

    def _lend(self, link: ServerLink, connection: Connection, local: LocalMemory) -> None:
        """Lends a server memory: what lies there need not cross the socket, if it uses that."""
        shared = self.shared_buffers[link.index]
        outbound, inbound = (
            tuple(map(shared.memory.place_of, views)) for views in (shared.outbound, shared.inbound)
        )
        offered = LendMemory(shared.memory.nbytes, outbound, inbound, self.lends_extra)
        if not self._accepts(connection, offered, shared.memory):
            return
        connection.lending = local.lend(shared.inbound, shared.outbound, borrowed=False)
        connection.spin = self._spin
        if not self.lends_extra:
            return
        try:
            memory = local.create(_LENT_BYTES)
        except OSError as error:
            _log.warning("there is no memory to lend for extra values: %s", error)
            return
        try:
            if self._accepts(connection, LendExtra(memory.nbytes), memory):
                link.lent = local.lent(memory)
        finally:
            memory.close()

    def _accepts(self, connection: Connection, offered: Message, memory: SharedMemory) -> bool:
        seconds = self.lanes.options.retry_seconds
        connection.stream.pass_descriptor(memory.fileno())
        connection.send(offered, timeout=seconds)
        answer = connection.receive(timeout=seconds).message
        return isinstance(answer, MemoryLent) and answer.accepted

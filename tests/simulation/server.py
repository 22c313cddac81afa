"""A simulated server's process: drives what `trireme.ps.server` runs over a simulated network."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tests.simulation.connection import Deliver, End, Payload
from tests.simulation.coordinator import CoordinatorHost
from tests.simulation.dealing import Violation
from tests.simulation.member import Member
from tests.simulation.network import DOWN, UP, Network, Wire
from tests.simulation.process import Process
from trireme.cluster.member_protocol import MemberProtocol, News
from trireme.cluster.messages import Dismissed, ReadyToSwitch, StatusValue
from trireme.cluster.view import ServerEntry, View
from trireme.errors import FrameError
from trireme.ps.messages import FencedVerdict, PushReply, Refused, Waiting
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.replication.messages import ConnectToShard, Pulse
from trireme.ps.replication.replica import Output, Replica
from trireme.ps.replication.replicas import Peer
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.loop_watch import LoopWatch
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.push_table import PushTable
from trireme.wire.handshake import Identity
from trireme.wire.message import Message
from trireme.wire.service import Link

_TICK_SECONDS, _OFTEN_SECONDS = 0.5, 0.1  # the latter where who notices what is checked
_RETRY_SECONDS = 0.1
_CONNECT_SECONDS = 5.0
_SPOILT = -0.123456  # what the memory of a gradient holds once it is given back


class Cluster(Protocol):
    """Where a server lives.

    Attributes:
        patience: after so many seconds without progress servers report another one, and are lost
            themselves when their loop is stuck; infinite where nobody does.
    """

    network: Network
    members_network: Network
    coordinator: CoordinatorHost
    counts: Counter[str]
    patience: float

    def server_at(self, address: str) -> Server | None:
        """Returns the process that listens at an address."""

    def make_dispatcher(self, server: Server, number: int) -> Dispatcher[Link]:
        """Makes an empty shard with its dispatcher."""

    def make_member(self, *said: Any) -> MemberProtocol:
        """Makes a process's membership."""

    def answered(self, server: Server, shard: int, task: Identity, message: Message) -> None:
        """A server answers a task about a shard."""

    def server_ended(self, server: Server, why: str) -> None:
        """A server's process has ended by itself."""


_MEMORY = 1 << 40
"""The bytes that each server's host has. Asking the real host is a third of a simulation's time."""


class _Handler(ShardHandler):
    """The handler of a server, whose shards are made by the simulator."""

    def __init__(
        self,
        index: int,
        now: Callable[[], float],
        make: Callable[[int], Dispatcher[Link]],
        patience: float,
    ) -> None:
        self._made = make
        super().__init__(index, now, patience=patience, memory=lambda: _MEMORY)

    def _make(self, number: int) -> Dispatcher[Link]:
        dispatcher = self._made(number)
        dispatcher.epoch = self.epoch
        return dispatcher

    def _carry_out(
        self, began: float, replica: Replica[Link], outputs: Iterable[Output[Link]]
    ) -> None:
        super()._carry_out(began, replica, _spoiling(outputs))


class Server:
    """One process of a server.

    Args:
        cluster: where it lives.
        index: its task index.
        host: the name of its host.
        pid: its process id, which no other process has.
    """

    def __init__(self, cluster: Cluster, index: int, host: str, pid: int) -> None:
        self.index, self.host, self.pid = index, host, pid
        self.address = f"tcp://{host}:{pid}"
        self.cluster = cluster
        self.process = Process(cluster.network.loop)
        self._membership = Process(cluster.network.loop)  # it outlives the service for a moment
        self.handler = _Handler(
            index,
            lambda: cluster.network.loop.now,
            lambda number: cluster.make_dispatcher(self, number),
            cluster.patience,
        )
        self.handler.peers_changed = self._want
        self.handler.peer_gone = self._lost
        self.member = Member(
            cluster.members_network,
            cluster.coordinator,
            self._membership,
            ("ps", index),
            (host, pid, self.address),
            cluster.make_member,
            self._hear,
        )
        self.handler.report = self.member.tell
        self._often = cluster.patience < math.inf
        self._watch = LoopWatch(cluster.patience, math.inf)
        self._turns = 0
        if self._often:
            self.member.state.extra_status = self._liveness
            self.member.state.able = self._is_able
        self._links: dict[tuple[Peer, ServerEntry], PeerLink] = {}
        self._turning = False

    @property
    def name(self) -> str:
        """Its task's name."""
        return f"ps:{self.index}"

    def begin(self) -> None:
        """Joins, and lets time pass."""
        self.member.connect()
        self.process.after(_TICK_SECONDS, self._tick)

    @property
    def stuck(self) -> bool:
        """Whether its loop is stuck, and its heart beats."""
        return self.process.alive and self.process.stopped and not self._membership.stopped

    def _liveness(self) -> Mapping[str, StatusValue]:
        self._watch.look(self.cluster.network.loop.now, self._turns, 0.0)
        return self._watch.status

    def _is_able(self) -> bool:
        self._liveness()
        return not self._watch.overdue

    def stop(self, seconds: float) -> None:
        """Stops the process for so long."""
        self.process.stop(seconds)
        self._membership.stop(seconds)

    def kill(self) -> None:
        """Kills the process."""
        self.process.kill()
        self._membership.kill()

    def table(self, shard: int, view: View) -> PushTable | None:
        """Returns the table of its copy of a shard; None if a view is of another generation."""
        replica = self.handler.replicas.by_shard.get(shard)
        same = self.handler.replicas.view.life == view.life
        if replica is None or replica.generation != view.generation or not same:
            return None
        return replica.shard.state.table

    def _tick(self) -> None:
        self.handler.tick(self.cluster.network.loop.now)
        self._turn()
        self.process.after(_OFTEN_SECONDS if self._often else _TICK_SECONDS, self._tick)

    def _turn(self) -> None:
        """Has the handler told that a turn of its loop is over, which may take several events."""
        if not self._turning:
            self._turning = True
            rng = self.cluster.network.rng
            self.process.after(0.0 if rng.random() < 0.7 else 0.002, self._turn_over)

    def _turn_over(self) -> None:
        self._turning = False
        self._turns += 1
        self.handler.turn_over()
        self._check_that_it_says_what_has_stopped()

    def _check_that_it_says_what_has_stopped(self) -> None:
        """A shard that has stopped, with all its copies, says so until another view comes."""
        for replica in self.handler.replicas.by_shard.values():
            if replica.log is None or not replica.shard.stopped or not replica.log.settled:
                continue
            view = replica.shard.state.participants.view.number
            said = ReadyToSwitch(view, replica.generation, replica.number)
            if said not in replica.reports():
                raise Violation(f"{self.name} does not say that shard {replica.number} has stopped")

    # -- the coordinator's news -------------------------------------------------------------------

    def _hear(self, news: News) -> None:
        if isinstance(news, View):
            self.handler.epoch = self.member.state.epoch
            incarnation = self.member.state.incarnation
            self.process.after(0.0, lambda: self._take(news, incarnation))
        elif isinstance(news, Dismissed):
            self.note("is dismissed")
            self.process.kill()
            self.member.leave("finished")
            self.cluster.server_ended(self, "dismissed")
        elif not self.member.state.confirmed:
            self.note(f"gives up: {news.reason}")
            self.kill()
            self.cluster.server_ended(self, "refused")

    def _take(self, view: View, incarnation: int) -> None:
        self.note(f"takes {view}")
        self.handler.view(view, incarnation)
        self._turn()

    # -- connections of others --------------------------------------------------------------------

    def accept(
        self,
        identity: Identity,
        wire: Wire,
        deliver: Deliver,
        accepted: Callable[[], None] = lambda: None,
    ) -> Deliver:
        """Takes a connection; returns what sends over it.

        Args:
            identity: of who has made it.
            wire: the connection.
            deliver: brings messages to who has made it.
            accepted: called when it is served.
        """
        process, ends, shard = self.process, list[End](), list[int]()
        process.holds(wire)

        def offer(message: Message, sequence: int, payload: Payload) -> None:
            if isinstance(message, Pulse) and not self._often:
                return  # without a patience no server waits for it
            if self.cluster.network.loop.note is not None:
                self.note(f"says {message} to {identity.task}")
            if shard and not _refuses(message):
                self.cluster.answered(self, shard[0], identity, message)
            wire.carry(DOWN, lambda: deliver(message, sequence, payload))

        def begin() -> None:
            ends.append(
                End(process, self.handler, identity, offer, lambda: wire.carry(DOWN, wire.break_))
            )
            accepted()

        def send(message: Message, sequence: int, payload: Payload) -> None:
            if isinstance(message, ConnectToShard):
                shard.append(message.shard)
            received = lambda: self.receive(ends, message, sequence, payload)  # noqa: E731
            wire.carry(UP, lambda: process.run(received))

        wire.carry(UP, lambda: process.run(begin) if process.alive else wire.break_())
        wire.ended = lambda: process.run(lambda: _end(ends))
        return send

    def receive(self, ends: list[End], message: Message, sequence: int, payload: Payload) -> None:
        """A message has come over a connection."""
        if not ends or ends[0].closed:
            return
        if self.cluster.network.loop.note is not None:
            self.note(f"hears {message} from {ends[0].identity.task}")
        try:
            ends[0].receive(message, sequence, payload)
        except FrameError as error:
            self.note(f"drops the connection to {ends[0].identity.task}: {error}")
            self.cluster.counts["frame errors"] += 1
            ends[0].close()
        self._turn()

    # -- connections to other servers -------------------------------------------------------------

    def _want(self, peers: Sequence[Peer], view: View) -> None:
        entries = {peer: view.server(peer.server) for peer in peers}
        wanted = {(peer, entry) for peer, entry in entries.items() if entry is not None}
        for gone in [each for each in self._links if each not in wanted]:
            self._links.pop(gone).close()
        for peer, entry in entries.items():
            if entry is not None and (peer, entry) not in self._links:
                self._links[peer, entry] = PeerLink(self, peer, entry)

    def _lost(self, link: Any) -> None:
        for each in [*self._links.values()]:
            each.lost(link)

    def note(self, what: str) -> None:
        """Says what happens, where somebody wants to read it."""
        loop = self.cluster.network.loop
        if loop.note is not None:
            loop.note(f"{loop.now:8.4f} ps:{self.index}.{self.pid} {what}")


class PeerLink:
    """A connection to another server, which is made again when it is lost, as long as wanted."""

    def __init__(self, server: Server, peer: Peer, entry: ServerEntry) -> None:
        self._server = server
        self._peer = peer
        self._entry = entry
        self._closed = False
        self._ends: list[End] = []
        self._connect()

    def lost(self, link: Any) -> None:
        """Connects again, if this was its connection."""
        if self._ends and link is self._ends[0]:
            self._ends = []
            self._again()

    def close(self) -> None:
        """Ends it."""
        self._closed = True
        for end in self._ends:
            end.close()

    def _again(self) -> None:
        if not self._closed:
            self._server.process.after(_RETRY_SECONDS, self._connect)

    def _connect(self) -> None:
        if self._closed:
            return
        server, cluster, ends = self._server, self._server.cluster, list[End]()
        server.note(f"connects for {self._peer}")
        process, other = server.process, cluster.server_at(self._entry.address)
        if other is None:
            self._again()
            return
        wire = cluster.network.wire(
            lambda: process.run(lambda: self._broke(ends)), ends=(server.name, other.name)
        )
        process.holds(wire)
        epoch = server.member.state.epoch
        send = other.accept(
            Identity("", server.name, epoch=epoch, calls=other.name),
            wire,
            lambda m, s, p: process.run(lambda: server.receive(ends, m, s, p)),
            lambda: wire.carry(DOWN, lambda: process.run(lambda: self._adopt(ends, wire, send))),
        )
        patience = lambda: None if ends else wire.break_()  # noqa: E731
        process.after(_CONNECT_SECONDS, patience)

    def _adopt(self, ends: list[End], wire: Wire, send: Deliver) -> None:
        if self._closed:
            wire.close()
            return
        server = self._server
        identity = Identity("", f"ps:{self._entry.index}", epoch=server.member.state.epoch)
        ends.append(
            End(server.process, server.handler, identity, send, wire.close, opened_here=True)
        )
        self._ends = ends
        server.handler.connected(ends[0], self._peer)  # type: ignore[arg-type]

    def _broke(self, ends: list[End]) -> None:
        self._server.note(f"loses its connection for {self._peer}")
        if ends:
            ends[0].broke()
        else:
            self._again()


def _spoiling(outputs: Iterable[Output[Link]]) -> Iterator[Output[Link]]:
    """Yields outputs; overwrites gradients that were given back, as the next push would."""
    for output in outputs:
        yield output
        staging = getattr(output.route, "staging", None) if isinstance(output, Reply) else None
        if staging is not None and staging.pool is None:
            for vector in staging.gradients.vectors:
                vector.fill_(_SPOILT)


def _refuses(message: Message) -> bool:
    """Returns whether a message answers nothing, but says that it cannot be answered here."""
    said = message.verdict if isinstance(message, PushReply) else message
    return isinstance(said, (FencedVerdict, Refused, Waiting))


def _end(ends: list[End]) -> None:
    for end in ends:
        end.broke()

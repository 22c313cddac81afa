"""Serves the replicas of one server over a `Service`: carries out what they ask for.

The loop has one thread: it receives a message in place, lets a replica decide, and sends what
follows before it handles the next message. So there are no locks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch
from msgspec.structs import replace

from trireme.cluster.messages import LinkLost
from trireme.cluster.view import View
from trireme.errors import FrameError, OutOfMemory, Rejected, WireError
from trireme.host import check_fits, host_memory
from trireme.job_config import JobConfig
from trireme.ps.flat import as_bytes
from trireme.ps.lending_messages import LendExtra, LendMemory, MemoryLent
from trireme.ps.messages import (
    Attach,
    FromServer,
    PulledExtra,
    PullExtra,
    PullReply,
    Push,
    PushReply,
    Refused,
    Share,
    Waiting,
)
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.replication.log import Tell
from trireme.ps.replication.messages import (
    PS_MESSAGES,
    Borrows,
    ConnectToLeader,
    ConnectToShard,
    Fill,
    FillExtra,
    FollowPrimary,
    Pulse,
    Replicate,
    Replicated,
)
from trireme.ps.replication.replica import Output, Replica, decoded
from trireme.ps.replication.replicas import Peer, Replicas
from trireme.ps.server.borrowed_memory import borrowed_memory
from trireme.ps.server.measures import Measures, Report
from trireme.ps.server.payloads import memory_for, needed_bytes, unpack
from trireme.ps.server.receive_buffer import ReceiveBuffer, Staging
from trireme.ps.shard.instructions import Reply, Send
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.state import ShardState
from trireme.ps.shard.watch import Watch
from trireme.ps.snapshot_messages import AddParameters, Load, WriteValues
from trireme.wire.connection import Incoming, SharedPayload
from trireme.wire.message import Message
from trireme.wire.service import Link

_log = logging.getLogger(__name__)

_STATUS_SECONDS = 0.5


class _Route(msgspec.Struct, frozen=True, eq=False):
    """The route of an answer: over no link for an event that another server has received."""

    link: Link | None
    sequence: int = 0  # the sequence of the request
    staging: Staging | None = None  # the receive buffer that is free again once the answer is sent


class ShardHandler:
    """Serves the replicas of one server; `memory` returns how many bytes this server can have."""

    messages: tuple[type[Message], ...] = PS_MESSAGES

    def __init__(
        self,
        index: int,
        now: Callable[[], float] = time.monotonic,
        measures: Measures | None = None,
        patience: float = math.inf,
        memory: Callable[[], int] = host_memory,
    ) -> None:
        self.index = index
        self.epoch: str | None = None  # the job's epoch; None where epochs are not checked
        self.config = JobConfig()  # the job's
        # makes what looks at a replica, by the number of its shard
        self.watch: Callable[[int], Watch] = lambda number: Watch()
        # the replicas that are served
        self.replicas: Replicas[Link] = Replicas(index, self._make, patience)
        # called with the connections that this server should have to others, and when one is lost
        self.peers_changed: Callable[[Sequence[Peer], View], object] = lambda peers, view: None
        self.peer_gone: Callable[[Link], object] = lambda link: None
        # called with what the coordinator should know of the replicas
        self.report: Callable[[Sequence[Message]], object] = lambda messages: None
        # takes the server's status every half second, or sooner
        self.on_report: Callable[[Report], object] = lambda status: None
        # takes what this server did, when it began and ended, for which task, and the step made
        self.note: Callable[[str, float, float, str, int], object] | None = None
        self._numbered = 0  # how many connections were made
        self._now, self._measures, self._memory = now, measures or Measures(), memory
        self._due, self._pause = 0.0, min(_STATUS_SECONDS, patience / 5)  # of statuses and pulses
        self._applied = 0  # how many updates were applied when that was looked at last
        self._bound: dict[Link, Replica[Link]] = {}  # what each connection is about
        self._replica_links: set[Link] = set()  # the connections of other replicas
        self._confirms: dict[Replica[Link], None] = {}  # that have applied entries in this turn
        self._buffers: dict[Replica[Link], ReceiveBuffer] = {}
        self._borrowed = borrowed_memory()
        self._local: deque[tuple[int, int, FromServer]] = deque()  # between shards of this server
        self._delivers = False
        # of a generation that is not here yet
        self._early: list[tuple[Link, ConnectToLeader | FollowPrimary]] = []
        self._reported: list[Message] = []
        # values for several workers, and what they are of: these tensors, after so many changes
        self._shared = SharedPayload()
        self._shared_of: tuple[Sequence[torch.Tensor], int] = (), 0

    def _make(self, number: int) -> Dispatcher[Link]:
        dispatcher: Dispatcher[Link] = Dispatcher(Shard(number))
        dispatcher.epoch = self.epoch
        dispatcher.shard.state.watch = self.watch(number)
        return dispatcher

    @property
    def shard(self) -> Shard:
        """The first shard that this server is primary of; of which it has a replica, if of none."""
        replicas = sorted(self.replicas.by_shard.values(), key=lambda r: (not r.primary, r.number))
        return replicas[0].shard if replicas else Shard(self.index)

    # -- the service's handler -------------------------------------------------------------------

    def authenticated(self, link: Link) -> None:
        link.connection.destination = lambda message, length: self._place(link, message, length)
        self._numbered += 1
        link.number = self._numbered

    def received(self, link: Link, incoming: Incoming) -> None:
        message, payload = incoming.message, incoming.payload
        if (replica := self._bound.get(link)) is None:
            self._open(link, message)
            return
        if isinstance(message, (Replicate, Replicated, Fill, FillExtra, Borrows)):
            self._replicate(link, replica, message, payload)
            return
        if isinstance(message, Pulse):
            if not self.replicas.pulse(link):
                raise FrameError(f"{link.identity.task} is not the primary of shard 0")
            return
        if isinstance(message, (ConnectToShard, ConnectToLeader, FollowPrimary)):
            raise FrameError(f"{link.identity.task} has said before what its connection is for")
        if (superseded := replica.dispatcher.admit(link, message)) is not None:
            superseded.close()
            if superseded is link:
                return
        began, staging = self._now(), None
        what: object = None
        if isinstance(message, LendMemory | LendExtra):
            self._borrow(link, message, incoming.sequence)
            return
        if isinstance(message, Push | PullExtra) and message.extra:
            message = replace(message, extra=self._borrowed.received(link, message.extra))
        if isinstance(message, Push):
            staging = self._buffer(replica).take(link, payload, link.identity.index)
            what = staging.gradients
            if not self._accepts(link, replica, message, staging):
                return
        try:
            if isinstance(message, Attach):
                self._check_fits(replica, message)
            elif isinstance(message, (Load, Share, WriteValues, AddParameters)):
                what = unpack(message, payload)
        except (OutOfMemory, Rejected) as error:
            link.offer(Refused("rejected", str(error), 0), sequence=incoming.sequence)
            return
        route = _Route(link, incoming.sequence, staging)
        lent = None if staging is None else self._borrowed.place_of(link, payload)
        outputs = replica.request(began, link, route, message, what, payload, lent)
        self._carry_out(began, replica, outputs)
        if isinstance(message, FromServer):
            self._tell_coordinator()
        if self.note is not None:
            self.note(type(message).__name__, began, self._now(), link.identity.task, 0)

    def closed(self, link: Link, error: WireError | None) -> None:
        self._early = [each for each in self._early if each[0] is not link]
        self._replica_links.discard(link)
        self.replicas.closed(link)
        replica = self._bound.pop(link, None)
        if replica is not None:
            replica.closed(link)
            if replica in self._buffers:
                self._buffers[replica].trim()
        if (memory := self._borrowed.remove(link)) is not None:
            for buffer in self._buffers.values():
                buffer.forget(memory)
            self._tell_primaries()
        if link.opened_here:
            self.peer_gone(link)

    def turn_over(self) -> None:
        """Confirms the entries that were applied since the last turn of the service's loop."""
        while self._confirms:
            replica, _ = self._confirms.popitem()
            if replica.source is not None:
                replica.source.offer(Replicated(replica.position, replica.lacks))

    def tick(self, now: float) -> None:
        for replica in [*self.replicas.by_shard.values()]:
            self._carry_out(now, replica, replica.tick(now, Link.taken))
        self.replicas.look(now)
        self._tell_coordinator()
        if now >= self._due:
            self._due = now + self._pause
            self.on_report(self.status())
            for link in self.replicas.speakers():
                link.offer(Pulse())

    def status(self) -> Report:
        return self._measures.status(self._now(), self.shard, self.replicas.logs())

    # -- from the coordinator --------------------------------------------------------------------

    def view(self, view: View, incarnation: int = 0) -> None:
        """Passes a new view to the replicas. In the service's thread."""
        now = self._now()
        self.replicas.incarnation = incarnation
        self._measures.view(now, view, self.replicas.logs())
        # Shards of this server hear each other when all have taken the view: before,
        # an answer could go out with values that another shard's message has changed since.
        self._delivers = True
        try:
            for replica, output in self.replicas.take(now, view):
                self._carry_out(now, replica, (output,))
        finally:
            self._delivers = False
        here = set(self.replicas.by_shard.values())
        for gone in self._buffers.keys() - here:
            del self._buffers[gone]
        for link, replica in [*self._bound.items()]:
            if replica not in here or (link in self._replica_links and not replica.primary):
                link.close()
        self.peers_changed(self.replicas.peers(), view)
        early, self._early = self._early, []
        for link, message in early:
            self._open(link, message)
        self._local += self.replicas.missed()
        self._deliver()
        self._tell_coordinator()

    def connected(self, link: Link, peer: Peer) -> None:
        if (taken := self.replicas.connected(link, peer)) is None:
            link.close()
            return
        replica, words = taken
        self._bound[link] = replica
        # `FollowPrimary` says how far it is, and it may be filled anew.
        self._confirms.pop(replica, None)
        for word in words:
            link.offer(word)
        if peer.follows and self._borrowed.identities:
            link.offer(Borrows(self._borrowed.identities))

    # -- what connections are for ----------------------------------------------------------------

    def _open(self, link: Link, message: Message) -> None:
        words: Sequence[Message] = ()
        outputs: Sequence[Output[Link]] = ()
        if isinstance(message, ConnectToShard):
            replica = self.replicas.addressed(link, message)
        elif not isinstance(message, (ConnectToLeader, FollowPrimary)):
            raise FrameError(f"{link.identity.task} did not say which shard it asks")
        elif link.identity.role != "ps":
            raise FrameError(
                f"{link.identity.task} may not say {type(message).__name__}: only a server may"
            )
        elif self.epoch not in (None, link.identity.epoch):
            raise FrameError(f"{link.identity.task} has not joined this start of the job")
        elif message.generation > self.replicas.view.generation:
            self._early.append((link, message))
            return
        elif isinstance(message, ConnectToLeader):
            replica, words = self.replicas.spoken(link, message) or (None, ())
        else:
            replica, outputs = self.replicas.followed(link, message) or (None, ())
            if replica is not None:
                self._replica_links.add(link)
        if replica is None:
            link.close()  # both sides have the newest view within moments
            return
        self._bound[link] = replica
        for word in words:
            link.offer(word)
        self._carry_out(self._now(), replica, outputs)

    # -- replication -----------------------------------------------------------------------------

    def _replicate(
        self,
        link: Link,
        replica: Replica[Link],
        message: Replicate | Replicated | Fill | FillExtra | Borrows,
        payload: Sequence[memoryview],
    ) -> None:
        now, task = self._now(), link.identity.task
        if isinstance(message, (Replicated, Borrows)):
            if link not in self._replica_links:
                raise FrameError(f"{task} confirms what was not sent to it")
            if isinstance(message, Borrows):
                replica.borrows(link, message.memories)
                return
            self._carry_out(now, replica, replica.confirmed(link, message))
            self._tell_coordinator()
            return
        if link is not replica.source:
            raise FrameError(f"{task} is not the primary of shard {replica.number}")
        try:
            if isinstance(message, Fill):
                replica.fill(now, message, unpack(message, payload))
                self._buffers.pop(replica, None)
            elif isinstance(message, FillExtra):
                replica.fill_extra(message, unpack(message, payload))
            else:
                self._follow(now, link, replica, message, payload)
        except Rejected as error:
            raise FrameError(f"what {task} sent cannot be taken over: {error}") from error
        self._confirms[replica] = None

    def _follow(
        self,
        now: float,
        link: Link,
        replica: Replica[Link],
        message: Replicate,
        payload: Sequence[memoryview],
    ) -> None:
        event, staging = decoded(message), None
        what: object = None
        if isinstance(event, Attach):
            self._check_fits(replica, event)
        elif isinstance(event, (Load, Share, WriteValues, AddParameters)):
            what = unpack(event, payload)
        elif isinstance(event, Push):
            buffer = self._buffer(replica)
            if not message.memory:
                staging = buffer.take(link, payload, message.index)
            elif (memory := self._borrowed.find(message.memory)) is not None:
                staging = buffer.named(link, memory, message.places, message.index)
            else:  # the worker has gone: the primary sends the rest over another connection
                link.close()
                return
            what = staging.gradients
            if not self._accepts(link, replica, event, staging):
                return
        route = _Route(None, staging=staging)
        self._carry_out(now, replica, replica.replicate(message, event, route, what))

    def _accepts(self, link: Link, replica: Replica[Link], push: Push, staging: Staging) -> bool:
        """Returns whether a gradient is as it was sent; if not, it is asked for by a new link."""
        watch = replica.shard.state.watch
        if watch.accepts(link.identity.task, push, staging.gradients):
            return True
        staging.release()
        link.close()
        return False

    def _borrow(self, link: Link, message: LendMemory | LendExtra, sequence: int) -> None:
        """Maps memory that a worker lends, and tells the primaries that this server follows."""
        before = self._borrowed.identities
        link.offer(MemoryLent(self._borrowed.add(link, message)), sequence=sequence)
        if self._borrowed.identities != before:
            self._tell_primaries()

    def _tell_primaries(self) -> None:
        for replica in self.replicas.by_shard.values():
            if replica.source is not None:
                replica.source.offer(Borrows(self._borrowed.identities))

    def _tell_coordinator(self) -> None:
        """Passes on what the coordinator should know, where it has changed."""
        reports = self.replicas.reports()
        if reports != self._reported:
            for each in reports:
                if isinstance(each, LinkLost) and each not in self._reported:
                    text = "ps:%d makes no progress with ps:%d, which shard %d needs: ps:%d has "
                    text += "had no time to answer, or the link between the two hosts is broken"
                    _log.warning(text, self.index, each.server, each.shard, each.server)
            self._reported = reports
            self.report(reports)

    # -- inside ----------------------------------------------------------------------------------

    def _check_fits(self, replica: Replica[Link], request: Attach) -> None:
        if replica.shard.state.shown is None:
            advice = "use more servers (--ps) on hosts of their own, or a smaller model"
            what = f"the model, with one gradient and the optimizer's state, at ps:{self.index}"
            check_fits(needed_bytes(request, replica.number), what, advice, self._memory())

    def _buffer(self, replica: Replica[Link]) -> ReceiveBuffer:
        if replica not in self._buffers:
            self._buffers[replica] = ReceiveBuffer(replica.shard.state)
        return self._buffers[replica]

    def _place(self, link: Link, message: Message, length: int) -> Sequence[memoryview]:
        replica, event = self._bound.get(link), message
        if replica is None:
            raise FrameError(f"{type(message).__name__} has no payload of {length} bytes")
        follows, worker = link is replica.source, link.identity.index
        if follows and isinstance(message, Replicate):
            event, worker = decoded(message), message.index
        if isinstance(event, Push):
            return self._buffer(replica).place(link, length, worker)
        if isinstance(event, (Fill, FillExtra)) and (event is not message or not follows):
            raise FrameError(f"{link.identity.task} does not fill shard {replica.number}")
        return memory_for(event, length, replica.shard.state)

    def _carry_out(
        self, began: float, replica: Replica[Link], outputs: Iterable[Output[Link]]
    ) -> None:
        """Carries out what a replica asks for, and then what other shards of this server hear."""
        state = replica.shard.state
        for output in outputs:
            if isinstance(output, Reply):
                route = output.route
                assert isinstance(route, _Route | None)
                if route is None:
                    continue
                if route.staging is not None and not isinstance(output.message, Waiting):
                    route.staging.release()
                if (link := route.link) is not None:
                    message = output.message
                    payload = self._payload(output, state)
                    if isinstance(message, PushReply | PulledExtra) and message.extra:
                        message = replace(message, extra=self._borrowed.answer(link, message.extra))
                    link.offer(message, payload, sequence=route.sequence)
            elif isinstance(output, Send):
                self._send(replica, output)
            elif isinstance(output, Tell):
                # Else entries that follow a large first state would end the connection, each time.
                output.link.windowed = True
                output.link.offer(output.message, output.payload)
        if state.counters["applied"] != self._applied and replica.primary:
            self._applied, ended = state.counters["applied"], self._now()
            self._measures.applied(ended - began)
            if self.note is not None:
                self.note("apply", began, ended, "", state.step)
        if self._local:
            self._deliver()

    def _payload(self, reply: Reply, state: ShardState) -> Sequence[memoryview]:
        tensors, values = reply.payload, state.values
        if not isinstance(reply.message, PushReply | PullReply):
            # A list: what fits would come over the values in memory that is lent.
            return [as_bytes(each) for each in tensors if each.numel()]
        held = () if values is None or tensors is not values.buffer.vectors else values.buffer.views
        if held and not state.synchronous:
            return held
        of, changes = self._shared_of, 0 if values is None else values.changes
        if tensors is not of[0] or changes != of[1]:
            self._shared_of = tensors, changes
            self._shared = SharedPayload(held or [as_bytes(t) for t in tensors if t.numel()])
        return self._shared

    def _send(self, replica: Replica[Link], word: Send) -> None:
        link = replica.dispatcher.link_for(word)
        if not replica.primary:
            return
        if self.replicas.local(word.shard) is not None:
            assert isinstance(word.message, FromServer)
            self._local.append((replica.number, word.shard, word.message))
        elif link is not None:
            link.offer(word.message)

    def _deliver(self) -> None:
        if self._delivers:
            return
        self._delivers = True
        try:
            while self._local:
                shard, other, word = self._local.popleft()
                hearer, now = self.replicas.local(other), self._now()
                if hearer is not None:
                    self._carry_out(now, hearer, hearer.heard(now, shard, word))
        finally:
            self._delivers = False

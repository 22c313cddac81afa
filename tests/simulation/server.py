"""A simulated server task: drives a real shard, as `trireme.ps.server.service` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tests.simulation.loop import Loop
from tests.simulation.network import DOWN, UP, Network, Wire
from trireme.cluster.view import View
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Push, Waiting
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.shard.instructions import Instruction, Reply, Send
from trireme.ps.shard.shard import Shard
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

_TICK_SECONDS = 1.0
_SPOILT = -0.123456  # what a gradient's memory holds once its answer is out


@dataclass(eq=False, slots=True)
class Link:
    """A server's end of a connection.

    Attributes:
        identity: who is at the other end.
        wire: the connection.
        deliver: lets the peer hear something, where it is another server.
        opened_here: whether the server has made it.
        closed: whether the server has closed it: what it still brings is not read.
    """

    identity: Identity
    wire: Wire
    deliver: Callable[[Message], None] = lambda message: None
    opened_here: bool = False
    closed: bool = False


@dataclass(slots=True)
class Route:
    """Where a request came from, and what it was.

    Attributes:
        link: over which it came.
        sequence: the request's, of that process.
        message: the request.
        hear: takes the answer at the process, with this route and its payload.
        gradients: the memory that a push was received into.
    """

    link: Link
    sequence: int
    message: Message
    hear: Callable[[Route, Message, Sequence[torch.Tensor]], None]
    gradients: PartBuffer | None = None


class Observer(Protocol):
    """Who watches the servers."""

    def viewed(self, server: int, view: View) -> None:
        """A server is about to take a view that it did not have."""

    def received(
        self, server: int, identity: Identity, message: Message, payload: Sequence[Any]
    ) -> None:
        """A message is about to happen to a server."""

    def happened(self, server: int, step: int, replies: Sequence[Reply]) -> None:
        """An event is over: the server's step now, and what it answers."""


class Server:
    """One server.

    Args:
        index: its task index.
        shard: what it serves.
        network: what carries its messages.
        observer: told of all that happens.
        dispatcher: how who says what to it is told apart.
    """

    def __init__(
        self,
        index: int,
        shard: Shard,
        network: Network,
        observer: Observer,
        dispatcher: Callable[[Shard], Dispatcher[Link]],
    ) -> None:
        self.index = index
        self.shard = shard
        self._dispatcher = dispatcher(shard)
        self._loop: Loop = network.loop
        self._observer = observer

    def view(self, view: View) -> None:
        """The coordinator's news."""
        self._note(f"takes {view}")
        self._observer.viewed(self.index, view)
        self._carry_out(self.shard.view(self._loop.now, view))

    def tick(self) -> None:
        """Passes time on, for ever."""
        self._carry_out(self.shard.tick(self._loop.now))
        self._loop.after(_TICK_SECONDS, self.tick)

    def opened(self, link: Link) -> None:
        """Somebody has connected, and has proven who it is."""
        self._dispatcher.opened(link)
        if link.identity.role == "ps":
            for word in self._dispatcher.speaks(link, link.identity.index):
                self._tell(link, word)

    def closed(self, link: Link) -> None:
        """A connection is gone, and all has come that it still brought."""
        link.closed = True
        self._dispatcher.closed(link)

    def receive(self, route: Route, payload: Sequence[Any]) -> None:
        """A request comes."""
        link, message = route.link, route.message
        if not self._admits(link, message):
            return
        self._observer.received(self.index, link.identity, message, payload)
        what: object = payload
        if isinstance(message, Push):
            assert self.shard.state.layout is not None
            copies = [tensor.clone() for tensor in payload]
            what = route.gradients = PartBuffer(self.shard.state.layout, self.index, copies)
        self._carry_out(self._dispatcher.dispatch(self._loop.now, link, route, message, what))

    def hear(self, link: Link, message: Message) -> None:
        """Another server says something."""
        if self._admits(link, message):
            self._carry_out(self._dispatcher.dispatch(self._loop.now, link, None, message))

    def _admits(self, link: Link, message: Message) -> bool:
        if link.closed:
            return False
        if self._loop.note is not None:
            self._note(f"hears {message} from {_name(link)}")
        superseded = self._dispatcher.admit(link, message)
        if superseded is not None:
            superseded.closed = True
            superseded.wire.break_()
        return superseded is not link

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        self._follow(instructions)
        while self.shard.due:
            self._follow(self.shard.go_on(self._loop.now))

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        replies = [instruction for instruction in instructions if isinstance(instruction, Reply)]
        self._observer.happened(self.index, self.shard.state.step, replies)
        for instruction in instructions:
            if isinstance(instruction, Send):
                link = self._dispatcher.link_for(instruction)
                if link is not None:
                    self._tell(link, instruction.message)
            else:
                self._reply(instruction)

    def _tell(self, link: Link, message: Message) -> None:
        link.wire.carry(UP if link.opened_here else DOWN, lambda: link.deliver(message))

    def _reply(self, reply: Reply) -> None:
        route = reply.route
        assert isinstance(route, Route)
        if not isinstance(reply.message, Waiting):
            self._spoil(route)
            if self._loop.note is not None:
                self._note(f"answers {reply.message} to {_name(route.link)}")
        wire = route.link.wire
        wire.carry(DOWN, lambda: route.hear(route, reply.message, reply.payload))

    def _spoil(self, route: Route) -> None:
        """The answer is out: the gradient's memory may be used for something else."""
        if route.gradients is not None:
            for vector in route.gradients.vectors:
                vector.fill_(_SPOILT)

    def _note(self, what: str) -> None:
        if self._loop.note is not None:
            self._loop.note(f"{self._loop.now:8.4f} ps:{self.index} {what}")


def _name(link: Link) -> str:
    return f"{link.identity.task}.{link.identity.incarnation}"


class Peering:
    """The connection of a server to server 0, which is made again whenever it breaks."""

    def __init__(self, network: Network, leader: Server, follower: Server) -> None:
        self._network = network
        self._leader = leader
        self._follower = follower
        self._connect()

    def _connect(self) -> None:
        leader, follower = self._leader, self._follower
        wire = self._network.wire(lambda: self._broke(near, far))
        far = Link(
            Identity("", f"ps:{follower.index}", calls="ps:0"),
            wire,
            lambda message: follower.hear(near, message),
        )
        near = Link(
            Identity("", "ps:0"), wire, lambda message: leader.hear(far, message), opened_here=True
        )
        follower.opened(near)
        leader.opened(far)

    def _broke(self, near: Link, far: Link) -> None:
        self._follower.closed(near)
        self._leader.closed(far)
        self._connect()

"""A simulated server task: drives a real shard, as `trireme.ps.server` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trireme.cluster.view import View
from trireme.ps.dense import PartBuffer
from trireme.ps.instructions import Instruction, Reply, Send
from trireme.ps.messages import (
    Attach,
    Cut,
    Drain,
    Freeze,
    Lease,
    Load,
    Pull,
    Push,
    PushesCommitted,
    PushesStaged,
    Retire,
    RoundClose,
    RoundReady,
    StopJob,
    Thaw,
    Waiting,
)
from trireme.ps.shard import Shard
from trireme.simulate.loop import Loop
from trireme.simulate.network import DOWN, UP, Network, Wire
from trireme.wire.message import Message

__all__ = ["Observer", "Peering", "Route", "Server"]

_TICK_SECONDS = 1.0
_SPOILT = -0.123456  # what a gradient's memory holds once its answer is out


@dataclass(slots=True)
class Route:
    """Where a request came from, and what it was.

    Attributes:
        client: the process that asked.
        wire: the connection it came over.
        sequence: the request's, of that process.
        message: the request.
        hear: takes the answer at the process, with this route and its payload.
        gradients: the memory that a push was received into.
    """

    client: str
    wire: Wire
    sequence: int
    message: Message
    hear: Callable[[Route, Message, Sequence[torch.Tensor]], None]
    gradients: PartBuffer | None = None


class Observer(Protocol):
    """Who watches the servers."""

    def viewed(self, server: int, view: View) -> None:
        """A server is about to take a view that it did not have."""

    def received(self, server: int, message: Message, payload: Sequence[Any]) -> None:
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
    """

    def __init__(self, index: int, shard: Shard, network: Network, observer: Observer) -> None:
        self.index = index
        self.shard = shard
        self.peers: dict[int, Peering] = {}
        self.untold: dict[int, Message] = {}
        self._loop: Loop = network.loop
        self._observer = observer
        self._view = 0
        self._newest: dict[str, int] = {}  # by process: its newest connection
        self._events: dict[type[Message], Callable[..., list[Instruction]]] = {
            Attach: shard.attach,
            Pull: shard.pull,
            Lease: shard.lease,
            StopJob: shard.stop,
            Drain: shard.drain,
            Retire: shard.retire,
            Freeze: shard.freeze,
            Cut: shard.cut,
            Thaw: shard.thaw,
        }

    def view(self, view: View) -> None:
        """The coordinator's news."""
        if view.number > self._view:
            self._view = view.number
            self._note(f"takes {view}")
            self._observer.viewed(self.index, view)
            self._carry_out(self.shard.view(self._loop.now, view))

    def tick(self) -> None:
        """Passes time on, for ever."""
        self._carry_out(self.shard.tick(self._loop.now))
        self._loop.after(_TICK_SECONDS, self.tick)

    def receive(self, route: Route, payload: Sequence[Any]) -> None:
        """A request comes. What an older connection of the same process still brings is dropped."""
        if route.wire.number < self._newest.get(route.client, 0):
            return
        self._newest[route.client] = route.wire.number
        if self._loop.note is not None:
            self._note(f"gets {route.message} from {route.client}")
        self._observer.received(self.index, route.message, payload)
        self._carry_out(self._happen(route, payload))

    def hear(self, message: Message) -> None:
        """Another server says something."""
        self._note(f"hears {message}")
        now = self._loop.now
        if isinstance(message, RoundReady):
            self._carry_out(self.shard.round_ready(now, message))
        elif isinstance(message, RoundClose):
            self._carry_out(self.shard.round_close(now, message))
        elif isinstance(message, PushesStaged):
            self._carry_out(self.shard.staged(now, message))
        elif isinstance(message, PushesCommitted):
            self._carry_out(self.shard.committed(now, message))

    def _happen(self, route: Route, payload: Sequence[Any]) -> list[Instruction]:
        now, shard, message = self._loop.now, self.shard, route.message
        if isinstance(message, Push):
            assert shard.layout is not None
            copies = [tensor.clone() for tensor in payload]
            route.gradients = PartBuffer(shard.layout, self.index, copies)
            return shard.push(now, route, message, route.gradients)
        if isinstance(message, Load):
            return shard.load(now, route, message, payload)
        return self._events[type(message)](now, route, message)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        self._follow(instructions)
        while self.shard.due:
            self._follow(self.shard.go_on(self._loop.now))

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        replies = [instruction for instruction in instructions if isinstance(instruction, Reply)]
        self._observer.happened(self.index, self.shard.step, replies)
        for instruction in instructions:
            if isinstance(instruction, Send):
                self.untold[instruction.server] = instruction.message
                self.peers[instruction.server].send(self, instruction.message)
            else:
                self._reply(instruction)

    def _reply(self, reply: Reply) -> None:
        route = reply.route
        assert isinstance(route, Route)
        if not isinstance(reply.message, Waiting):
            self._spoil(route)
            if self._loop.note is not None:
                self._note(f"answers {reply.message} to {route.client}")
        route.wire.carry(DOWN, lambda: route.hear(route, reply.message, reply.payload))

    def _spoil(self, route: Route) -> None:
        """The answer is out: the gradient's memory may be used for something else."""
        if route.gradients is not None:
            for vector in route.gradients.vectors:
                vector.fill_(_SPOILT)

    def _note(self, what: str) -> None:
        if self._loop.note is not None:
            self._loop.note(f"{self._loop.now:8.4f} ps:{self.index} {what}")


class Peering:
    """The connection of a server to server 0; each end repeats its last word on a new one."""

    def __init__(self, network: Network, leader: Server, follower: Server) -> None:
        self._network = network
        self._ends = {UP: leader, DOWN: follower}
        self._wire = network.wire(self._again)
        leader.peers[follower.index] = self
        follower.peers[leader.index] = self

    def send(self, origin: Server, message: Message) -> None:
        """Carries a message from one end to the other."""
        way = DOWN if origin is self._ends[UP] else UP
        wire, target = self._wire, self._ends[way]

        def deliver() -> None:
            if wire is self._wire:
                target.hear(message)

        wire.carry(way, deliver)

    def _again(self) -> None:
        self._wire = self._network.wire(self._again)
        for way, target in self._ends.items():
            origin = self._ends[DOWN if way == UP else UP]
            if target.index in origin.untold:
                self.send(origin, origin.untold[target.index])

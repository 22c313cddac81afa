"""A process's connections to all shards, over a network in virtual time.

What is said is `ClientProtocol`'s, what is sent when `Lanes`': the same as in a worker's process.
As there, what the network brings is looked at while somebody waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from tests.simulation.connection import Deliver, Payload
from tests.simulation.expected_values import Made, Vectors, Violation
from tests.simulation.loop import Start
from tests.simulation.model import COUNTED, LATE, layout_over, loading, part_of
from tests.simulation.network import DOWN, Network, Wire
from tests.simulation.process import Process
from tests.simulation.server import Server
from trireme.cluster.view import ServerEntry, View
from trireme.errors import CopiesLost, Fenced, PeerClosed, Rejected, TriremeError, WaitTimeout
from trireme.ps.client.lanes import Answer, Divided, Lanes, Request, Transmit
from trireme.ps.client.operations import DIVIDE, PUBLISH, PUSH, Ask, Operation, Pause
from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.extra import ShownExtension, bytes_in
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    LayoutSpec,
    OptimizerSpec,
    ParameterSpec,
    PulledExtra,
    PullReply,
    PushReply,
)
from trireme.ps.replication.messages import ConnectToShard
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

_T = TypeVar("_T")
_Steps = Generator[Start, Any, _T]


class Place(Protocol):
    """Where clients live."""

    network: Network

    def server_at(self, address: str) -> Server | None:
        """Returns the process that listens at an address."""

    def seen(self, client: Client, life: int, shard: int, step: int, vectors: Vectors) -> None:
        """A worker has received values of a shard."""

    def told_rows(self, life: int, bounds: Sequence[int], step: int, rows: bytes) -> None:
        """A server has told a worker the rows of all keys of a shard, which has these slots."""

    def counts_known(self, life: int) -> tuple[int, ...]:
        """Returns by worker how many updates are acknowledged."""

    def counted(
        self, life: int, slot: int, times: tuple[float, float], counts: Any, known: tuple[int, ...]
    ) -> None:
        """A worker has received a slot's values."""


class _Link(msgspec.Struct, eq=False):
    """The connection to one shard's primary.

    Messages wait until the server has accepted the connection, as a handshake makes them wait. So
    the server has noted this connection before the client makes another one.
    """

    wire: Wire
    entry: ServerEntry
    deliver: Deliver
    held: list[tuple[Message, int, Payload]] | None = msgspec.field(default_factory=list)

    def send(self, message: Message, sequence: int, payload: Payload) -> None:
        """Sends a message, once the server has accepted the connection."""
        if self.held is None:
            self.deliver(message, sequence, payload)
        else:
            self.held.append((message, sequence, payload))

    def accepted(self) -> None:
        """The server has accepted the connection."""
        held, self.held = self.held or [], None
        for each in held:
            self.deliver(*each)


class Client:
    """One process's connections.

    Args:
        identity: of the process.
        place: where it lives.
        process: the same process.
        protocol: what is said.
        lanes: makes what decides what is sent when.
        view: tells the newest view that the process has heard of.
        levels: whether the values of all shards must be of one step.

    Attributes:
        layout: the model's, over the shards as the client knows them.
        draining: whether the worker has retired, and waits until the others have: where the
            servers wait for it, they wait for another incarnation of it.
        life: how often the job was rolled back, as far as requests are laid out for it.
        values: the whole flat vectors, as they were received.
    """

    def __init__(
        self,
        identity: Identity,
        place: Place,
        process: Process,
        protocol: ClientProtocol,
        lanes: Callable[..., Lanes],
        view: Callable[[], View],
        *,
        levels: bool = False,
    ) -> None:
        self.identity = identity
        self.protocol = protocol
        self.lanes = lanes(waiting=self._take_notice)
        self.draining = False
        self._place = place
        self._network = place.network
        self._process = process
        self._view = view
        self._levels = levels
        self.grown = False  # whether it has the parameter that is added
        self._closed = False
        self._pushed: Made | None = None
        self._steps: dict[int, int] = {}  # by shard: of the values that it has sent last
        self._happened: deque[Callable[[], Sequence[Transmit] | None]] = deque()
        self._resume: Callable[[Any], None] | None = None  # of who waits for answers
        self._due = math.inf  # when a tick comes
        self._asked = 0.0
        self._known: tuple[int, ...] = ()
        self._seen_view = view().number
        self.values: Vectors = ()
        self._lay_out()

    @property
    def name(self) -> str:
        """The process, for messages."""
        return f"{self.identity.task}.{self.identity.incarnation}"

    # -- operations -------------------------------------------------------------------------------

    def attach(
        self, optimizer: OptimizerSpec, rule: Rule, extension: ShownExtension | None = None
    ) -> _Steps[bool]:
        """Shows every shard the model; returns whether all have values."""
        if self.lanes.lost:
            self._lay_out()
            self.protocol.renew()
        attach = self.protocol.attach(self.layout.spec, optimizer, rule, extension)
        return (yield from self.run(attach))

    def add_late(self, optimizer: OptimizerSpec, value: float) -> _Steps[None]:
        """Adds a parameter, all of whose elements have one value."""

        def grown(known: Sequence[ParameterSpec]) -> tuple[LayoutSpec, Any]:
            layout = layout_over(self.layout.spec.bounds, grown=True)
            values = {LATE.name: torch.full(LATE.shape, value, dtype=torch.float64)}
            there = any(each.name == LATE.name for each in known)
            state = ModelState(0, {} if there else values)
            return layout.spec, loading(layout, state, complete=False)

        def lay_out(known: object) -> None:
            self.grown, self.values = True, ()

        yield from self.run(self.protocol.add_parameters(optimizer, grown, lay_out))

    def renew(self, incarnation: int) -> None:
        """Begins again as another incarnation."""
        self._hang_up_all()
        self.identity = Identity("", self.identity.task, incarnation, self.identity.epoch)
        self.lanes.options = replace(self.lanes.options, incarnation=incarnation)
        self.protocol.renew()

    def run(self, operation: Operation[_T]) -> _Steps[_T]:
        """Carries an operation out; returns what it has in the end.

        Raises:
            Fenced: the process is out of the job, or the view has changed.
            Rejected: a server found the request invalid.
            WaitTimeout: a copy could not be had in time.
            Violation: anything else that only a broken job comes to.
        """
        result: Any = None
        try:
            while True:
                failed = isinstance(result, (Fenced, Divided))
                wanted = operation.throw(result) if failed else operation.send(result)
                if wanted == PUBLISH:
                    result = self._check_published()
                elif wanted == DIVIDE:
                    self._lay_out()
                    result = self.layout.spec
                elif wanted == PUSH:
                    result = self._send_push(range(self.layout.spec.shards))
                elif isinstance(wanted, Pause):
                    result = yield partial(self._pause, wanted.seconds)
                else:
                    result = yield from self._answers(wanted)
        except StopIteration as ended:
            value: _T = ended.value
            return value
        except (Fenced, Rejected, WaitTimeout):
            raise
        except TriremeError as error:
            raise Violation(f"{self.name}: {type(error).__name__}: {error}") from error

    def push(self, made: Made, shards: Sequence[int]) -> None:
        """Sends a push, shard by shard.

        Raises:
            CopiesLost: all copies of a shard were lost.
        """
        self._pushed = made
        self._send_push(shards)

    def _send_push(self, shards: Sequence[int]) -> None:
        assert self._pushed is not None
        requests = self._requests_of(self._pushed)
        with suppress(Divided):
            self._ask({s: requests[s] for s in shards if s in requests})

    def send(self, message: Message, shards: Sequence[int]) -> None:
        """Asks shards something, whose answers nobody waits for."""
        with suppress(Divided, CopiesLost):
            self._ask({s: Request(message) for s in shards if s < self.layout.spec.shards})

    def close(self) -> None:
        """Ends all connections, as the end of a process does."""
        self._closed = True
        self._hang_up_all()

    # -- as `trireme.ps.client.client` does -------------------------------------------------------

    def _answers(self, wanted: Any) -> _Steps[Any]:
        """Asks, and waits for the answers; or returns why there are none."""
        result = yield partial(self._carry_out, wanted)
        if isinstance(result, TriremeError) and not isinstance(result, Fenced):
            raise result
        return result

    def _lay_out(self) -> None:
        view = self._view()
        self._hang_up_all()
        self.life = view.life
        self.layout: Layout = layout_over(view.bounds, grown=self.grown)
        self._links: list[_Link | None] = [None] * self.layout.spec.shards
        self._steps.clear()
        self.lanes.divide(self.layout.spec.shards)
        self.protocol.divide(self.layout.spec.shards, self.layout.spec.bounds)

    def _requests_of(self, made: Made) -> dict[int, Request]:
        return {
            shard: Request(
                self.protocol.message(made.push, shard),
                [memoryview(v.tobytes()) for v in part_of(self.layout, made.gradient, shard)],
            )
            for shard in range(self.layout.spec.shards)
        }

    # -- asking, and waiting ----------------------------------------------------------------------

    def _pause(self, seconds: float, resume: Callable[[Any], None]) -> None:
        self._process.after(seconds, lambda: resume(self._network.loop.now))

    def _carry_out(self, wanted: Any, resume: Callable[[Any], None]) -> None:
        self._resume = resume
        self._happen(partial(self._begin, wanted))
        self._look()

    def _begin(self, wanted: Any) -> None:
        if isinstance(wanted, Ask):
            self._ask(wanted.requests, again=wanted.again)
        self.lanes.wait(self._network.loop.now)

    def _ask(self, requests: dict[int, Request] | Any, *, again: bool = True) -> None:
        now = self._asked = self._network.loop.now
        self._known = self._place.counts_known(self.life)
        self._transmit(self.lanes.ask(now, requests, again=again))

    def _look(self) -> None:
        """Takes what has happened, as long as somebody waits."""
        while self._happened and self._resume is not None:
            self._happen(self._happened.popleft())
        if self._resume is not None:
            self._happen(lambda: None)

    def _happen(self, event: Callable[[], Sequence[Transmit] | None]) -> None:
        try:
            self._transmit(event() or ())
        except (TriremeError, Divided) as error:
            self._finish(error)
            return
        if not self.lanes.waiting:
            self._finish(self._taken())
        elif self.lanes.due < self._due:
            self._due = self.lanes.due
            self._network.loop.at(self._due, lambda: self._process.run(self._tick))

    def _finish(self, result: Any) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume(result)

    def _taken(self) -> dict[int, Answer]:
        out = {}
        for shard, (message, payload) in self.lanes.answers.items():
            if isinstance(message, (PushReply, PullReply)):
                self._steps[shard] = message.step
                if payload:
                    self._receive_values(shard, message.step, payload)
            out[shard] = message, payload
        return out

    def _receive_values(self, shard: int, step: int, payload: Payload) -> None:
        """Takes a shard's part of the values."""
        if not self.values:
            self.values = tuple(np.zeros(v.length, v.dtype) for v in self.layout.vectors)
        part = part_of(self.layout, self.values, shard)
        if len(payload) != len(part):
            raise Violation(f"{self.name} has {len(part)} vectors, and is sent {len(payload)}")
        for vector, data in zip(part, payload, strict=True):
            vector[:] = np.frombuffer(data, vector.dtype)
        self._place.seen(self, self.life, shard, step, part)
        if self._known:
            times = self._asked, self._network.loop.now
            slots = self.layout.slots_of(shard)
            counts = part[COUNTED].reshape(len(slots), -1)[:, : len(self._known)]
            for slot, row in zip(slots, counts, strict=True):
                self._place.counted(self.life, slot, times, row, self._known)

    def _check_published(self) -> None:
        steps = set(self._steps.values())
        if self._levels and steps and steps != {self.protocol.step}:
            raise Violation(f"{self.name} computes from {self._steps} as step {self.protocol.step}")

    def _tick(self) -> None:
        self._due = math.inf
        self._later(lambda: self.lanes.tick(self._network.loop.now))

    def viewed(self) -> None:
        """The process has heard of a view: replaced primaries cannot answer any more."""
        self._later(self._leave_replaced)

    def _leave_replaced(self) -> Sequence[Transmit]:
        now = self._network.loop.now
        out = self.lanes.tick(now)
        for lane in [*self.lanes.waiting]:
            link = self._links[lane.index]
            if link is not None and link.entry != self.lanes.entry(lane.index):
                self._hang_up(lane.index)
                self.lanes.broke(now, lane.index, PeerClosed("it is not the primary any longer"))
        return out

    def _later(self, event: Callable[[], Sequence[Transmit] | None]) -> None:
        if not self._closed:
            self._happened.append(event)
            self._look()

    def _take_notice(self, reason: str, names: Sequence[str], seconds: float) -> None:
        if self.draining and self.identity.task in names:
            raise Fenced(f"the servers wait for {self.name}, which has retired", 0)

    # -- connections ------------------------------------------------------------------------------

    def _transmit(self, orders: Sequence[Transmit]) -> None:
        for order in orders:
            entry, link = self.lanes.entry(order.shard), self._links[order.shard]
            if link is not None and link.entry != entry:
                self._hang_up(order.shard)  # another server has the primary now
                link = None
            link = link or self._connect(order.shard, entry)
            if link is not None:
                link.send(order.message, order.sequence, [bytes(view) for view in order.payload])

    def _connect(self, shard: int, entry: ServerEntry) -> _Link | None:
        """Connects to a primary, and says which shard it is to be asked."""
        server, process, links = self._place.server_at(entry.address), self._process, self._links
        if server is None:
            error = PeerClosed(f"nobody listens at {entry.address}")
            self._later(lambda: self.lanes.broke(self._network.loop.now, shard, error))
            return None
        wire = self._network.wire(
            lambda: process.run(lambda: self._later(lambda: self._broke(shard, link))),
            ends=(self.identity.task, server.name),
        )
        process.holds(wire)

        def heard(message: Message, sequence: int, payload: Payload) -> None:
            process.run(lambda: self._heard(shard, link, message, sequence, payload))

        def accepted() -> None:
            wire.carry(DOWN, lambda: process.run(link.accepted))

        link = _Link(wire, entry, server.accept(self.identity, wire, heard, accepted))
        links[shard] = link
        link.send(ConnectToShard(shard, self.lanes.generation or 0), 0, ())
        return link

    def _heard(
        self, shard: int, link: _Link, message: Message, sequence: int, payload: Payload
    ) -> None:
        def event() -> None:
            if shard < len(self._links) and self._links[shard] is link:
                self.lanes.heard(self._network.loop.now, shard, sequence, message, payload)
                if isinstance(message, PushReply | PulledExtra):
                    bounds = self.layout.spec.bounds[shard : shard + 2]
                    for rows in bytes_in(message.extra):
                        self._place.told_rows(self.life, bounds, message.step, rows)

        self._later(event)

    def _broke(self, shard: int, link: _Link) -> None:
        if shard < len(self._links) and self._links[shard] is link:
            self._links[shard] = None
            error = PeerClosed(f"the connection to shard {shard} broke")
            self.lanes.broke(self._network.loop.now, shard, error)

    def _hang_up_all(self) -> None:
        for shard in range(len(getattr(self, "_links", ()))):
            self._hang_up(shard)

    def _hang_up(self, shard: int) -> None:
        link = self._links[shard]
        if link is not None:
            link.wire.close()
            self._links[shard] = None

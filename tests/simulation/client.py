"""A process's connections to all servers, over a network in virtual time.

What is said is `ClientProtocol`'s, what is sent when `Lanes`': the same as in a worker's process.
As there, what the network brings is looked at while somebody waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from tests.simulation.expected_values import Violation
from tests.simulation.loop import Start
from tests.simulation.network import UP, Network
from tests.simulation.server import Link, Route, Server
from trireme.cluster.view import View
from trireme.errors import Fenced, PeerClosed, Rejected, TriremeError, WaitTimeout
from trireme.ps.client.lanes import Lanes, Request, Transmit
from trireme.ps.client.protocol import PUBLISH, Ask, ClientProtocol, Operation, Pause
from trireme.ps.messages import PullReply, Push, PushReply, Waiting
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

_T = TypeVar("_T")


class Client:
    """One process's connections.

    Args:
        identity: of the process.
        network: what carries the messages.
        servers: whom to talk to.
        protocol: what is said.
        lanes: makes what decides what is sent when.
        view: tells the newest view that the process has heard of.
        levels: whether the values of all servers must be of one step.

    Attributes:
        draining: whether the worker has retired, and waits until the others have: where the
            servers wait for it, they wait for another incarnation of it.
    """

    def __init__(
        self,
        identity: Identity,
        network: Network,
        servers: Sequence[Server],
        protocol: ClientProtocol,
        lanes: Callable[..., Lanes],
        view: Callable[[], View],
        *,
        levels: bool = False,
    ) -> None:
        self.name = f"{identity.task}.{identity.incarnation}"
        self.identity = identity
        self.protocol = protocol
        self.lanes = lanes(waiting=self._take_notice)
        self.draining = False
        self._network = network
        self._servers = servers
        self._view = view
        self._levels = levels
        self._closed = False
        self._links: list[Link | None] = [None] * len(servers)
        self._steps: dict[int, int] = {}  # by server: of the values that it has sent last
        self._begun: dict[int, Transmit] = {}  # by server: what of a push is on its way early
        self._happened: deque[Callable[[], Sequence[Transmit] | None]] = deque()
        self._resume: Callable[[Any], None] | None = None  # of who waits for answers
        self._due = math.inf  # when a tick comes

    def run(self, operation: Operation[_T]) -> Generator[Start, Any, _T]:
        """Carries an operation out; returns what it has in the end.

        Raises:
            Fenced: the process is out of the job, or the view has changed.
            Rejected: a server found the request senseless.
            WaitTimeout: a copy could not be had in time.
            Violation: anything else that only a broken job comes to.
        """
        if self.protocol.announced is not None:
            self.protocol.announced = None
            self._drop_begun()
        result: Any = None
        try:
            while True:
                fenced = isinstance(result, Fenced)
                wanted = operation.throw(result) if fenced else operation.send(result)
                if wanted == PUBLISH:
                    self._check_published()
                    result = None
                    continue
                result = yield partial(self._carry_out, wanted)
                if isinstance(result, TriremeError) and not isinstance(result, Fenced):
                    raise result
        except StopIteration as ended:
            value: _T = ended.value
            return value
        except (Fenced, Rejected, WaitTimeout):
            raise
        except TriremeError as error:
            raise Violation(f"{self.name}: {type(error).__name__}: {error}") from error

    def announce(self, update: Push, servers: Sequence[int]) -> None:
        """A push begins to leave; only who is connected has it early."""
        self._drop_begun()
        self.protocol.announced = update
        for server in servers:
            if self._links[server] is not None:
                sequence = self.lanes.announce(server)
                message = self.protocol.message(update, server)
                message = msgspec.structs.replace(message, view=self._view().number)
                self._begun[server] = Transmit(server, sequence, message, ())

    def push(self, update: Push, parts: dict[int, Sequence[torch.Tensor]]) -> None:
        """Sends a push, server by server; what of it has left early is completed if it may be."""
        sent: dict[int, Transmit] = {}
        if self.protocol.announced is not None and self.protocol.completes(update):
            sent = {s: self._begun.pop(s) for s in parts if s in self._begun and self._links[s]}
        self._drop_begun()
        requests = {s: Request(self.protocol.message(update, s), parts[s]) for s in parts}
        self._transmit(self.lanes.ask(self._network.loop.now, requests, sent=sent))
        for server, order in sent.items():
            self._transmit([Transmit(server, order.sequence, order.message, parts[server])])

    def close(self) -> None:
        """Ends all connections, as the end of a process does."""
        self._closed = True
        for server in range(len(self._links)):
            self._hang_up(server)

    # -- inside -----------------------------------------------------------------------------------

    def _carry_out(self, wanted: Any, resume: Callable[[Any], None]) -> None:
        loop = self._network.loop
        if isinstance(wanted, Pause):
            loop.after(wanted.seconds, lambda: resume(loop.now))
            return
        self._resume = resume
        if isinstance(wanted, Ask):
            self._happen(partial(self._ask, wanted))
        self.lanes.wait(loop.now)
        self._look()

    def _ask(self, wanted: Ask) -> Sequence[Transmit]:
        return self.lanes.ask(self._network.loop.now, wanted.requests, again=wanted.again)

    def _look(self) -> None:
        """Takes what has happened, as long as somebody waits."""
        while self._happened and self._resume is not None:
            self._happen(self._happened.popleft())
        if self._resume is not None:
            self._happen(lambda: None)

    def _happen(self, event: Callable[[], Sequence[Transmit] | None]) -> None:
        try:
            self._transmit(event() or ())
        except TriremeError as error:
            self._finish(error)
            return
        if not self.lanes.waiting:
            self._finish(self._taken())
        elif self.lanes.due < self._due:
            self._due = self.lanes.due
            self._network.loop.at(self._due, self._tick)

    def _finish(self, result: Any) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            resume(result)

    def _taken(self) -> Any:
        for server, (message, _) in self.lanes.answers.items():
            if isinstance(message, (PushReply, PullReply)):
                self._steps[server] = message.step
        return self.lanes.answers

    def _check_published(self) -> None:
        steps = set(self._steps.values())
        if self._levels and steps != {self.protocol.step}:
            raise Violation(f"{self.name} computes from {self._steps} as step {self.protocol.step}")

    def _tick(self) -> None:
        self._due = math.inf
        self._later(lambda: self.lanes.tick(self._network.loop.now))

    def _later(self, event: Callable[[], Sequence[Transmit] | None]) -> None:
        if not self._closed:
            self._happened.append(event)
            self._look()

    def _take_notice(self, notice: Waiting) -> None:
        if self.draining and self.identity.task in notice.names:
            raise Fenced(f"the servers wait for {self.name}, which has retired", 0)

    def _transmit(self, orders: Sequence[Transmit]) -> None:
        for order in orders:
            server = self._servers[self.lanes.entry(order.server).index]
            link = self._links[order.server] or self._connect(server)
            heard = partial(self._heard, order.server)
            route = Route(link, order.sequence, order.message, heard)
            link.wire.carry(UP, partial(server.receive, route, order.payload))

    def _connect(self, server: Server) -> Link:
        wire = self._network.wire(
            lambda: self._later(lambda: self._broke(server.index, link)),
            lambda: server.closed(link),
        )
        link = self._links[server.index] = Link(self.identity, wire)
        server.opened(link)
        return link

    def _heard(
        self, server: int, route: Route, message: Message, payload: Sequence[torch.Tensor]
    ) -> None:
        def event() -> None:
            if self._links[server] is route.link:
                now = self._network.loop.now
                self.lanes.heard(now, server, route.sequence, message, payload)

        self._later(event)

    def _broke(self, server: int, link: Link) -> None:
        if self._links[server] is link:
            self._links[server] = None
            error = PeerClosed(f"the connection to ps:{server} broke")
            self.lanes.broke(self._network.loop.now, server, error)

    def _drop_begun(self) -> None:
        """Gives up what has begun to leave: no server has the whole of it, nor ever will."""
        for server in self._begun:
            self._hang_up(server)
        self._begun = {}

    def _hang_up(self, server: int) -> None:
        link = self._links[server]
        if link is not None:
            link.wire.close()
            self._links[server] = None

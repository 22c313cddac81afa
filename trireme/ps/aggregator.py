"""The aggregator of a host: sums the updates of its workers before they leave it.

A process of its own between the workers of one host, over shared memory, and the server, over the
network: what crosses the network per step does not grow with the workers of the host. It keeps
nothing that cannot be lost. When it dies, or does not answer, its workers push by themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trireme.cluster.view import ServerEntry
from trireme.errors import ConfigurationError, FrameError, WireError
from trireme.ps.dense import PartBuffer
from trireme.ps.gathering import PATIENCE_SECONDS, Gathering, Instruction, SendSum
from trireme.ps.host_link import aggregator_address
from trireme.ps.intake import Intake, Staging
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    PS_MESSAGES,
    Enlist,
    Enlisted,
    LendMemory,
    MemoryLent,
    Push,
    PushedTogether,
    PushTogether,
    Refused,
    Waiting,
)
from trireme.ps.rule import Rule
from trireme.ps.server import LeaderLink
from trireme.wire.connection import Incoming
from trireme.wire.handshake import Identity
from trireme.wire.message import Message
from trireme.wire.service import Link, Service
from trireme.wire.transport import listen

__all__ = ["Aggregator", "AggregatorConfig", "AggregatorHandler", "connect_through"]

_log = logging.getLogger(__name__)

IDLE_SECONDS = 30.0
"""After this long without a worker the aggregator ends: a worker may be started anew before."""


@dataclass(frozen=True, slots=True)
class _Route:
    """Where an answer goes."""

    link: Link
    sequence: int
    staging: Staging


class AggregatorHandler:
    """Serves the workers of one host over a `Service`, and speaks to the server for them.

    Args:
        now: the service's clock.
        patience: seconds that the others of the host wait for one.
        join_timeout: seconds until the first worker must have come.

    Attributes:
        gathering: what is on its way.
        epoch: which start of the job the workers here have joined; "" before the first.
        reach: called with the server's address when it is to be connected to.
        unused: called when no worker has come in time, or none has come back.
    """

    messages: tuple[type[Message], ...] = PS_MESSAGES

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        *,
        patience: float = PATIENCE_SECONDS,
        join_timeout: float = 300.0,
    ) -> None:
        self.gathering = Gathering(lambda: self._spare, patience=patience)
        self.epoch = ""
        self.reach: Callable[[str], None] = lambda server: None
        self.unused: Callable[[], None] = lambda: None
        self._now = now
        self._ends: float | None = now() + join_timeout  # if no worker comes before
        self._reaching = False
        self._layout: Layout | None = None
        self._shown_by = ""
        self._enlisted: Enlist | None = None
        self._intake = Intake(0, lambda: self._layout, Rule)
        self._links: dict[int, Link] = {}
        self._server: Link | None = None
        self._sum: PartBuffer | None = None
        self._values: PartBuffer | None = None

    # -- the service's handler ------------------------------------------------------------------

    def authenticated(self, link: Link) -> None:
        """A worker, or the server that this process has connected to."""
        link.destination = lambda message, length: self._place(link, message, length)
        if link.opened_here:
            self._server, self._reaching = link, False
            self._carry_out(self.gathering.connect())

    def received(self, link: Link, incoming: Incoming) -> None:
        """Lets a message happen, and carries out what that leads to."""
        message, sequence = incoming.message, incoming.sequence
        if link is self._server:
            self._carry_out(self._heard(message, sequence, incoming.payload))
        elif isinstance(message, Enlist):
            link.offer(self._enlist(link, message), sequence=sequence)
        elif isinstance(message, LendMemory):
            link.offer(MemoryLent(self._intake.borrow(link, message)), sequence=sequence)
        elif isinstance(message, Push) and self._speaks(link, message):
            staging = self._intake.take(link, incoming.payload)
            route = _Route(link, sequence, staging)
            self._carry_out(self.gathering.push(self._now(), route, message, staging.gradients))
        else:
            raise FrameError(f"an aggregator is not asked {type(message).__name__}")

    def closed(self, link: Link, error: WireError | None) -> None:
        """A worker has left; or the server is out of reach, until it is connected to again."""
        if link is self._server:
            self._server = None
            self._carry_out(self.gathering.disconnect())
            if self._links:
                self._reach()
        for worker in [w for w, other in self._links.items() if other is link]:
            del self._links[worker]
            self._carry_out(self.gathering.leave(worker))
        if not self._links and self._ends is None:
            self._ends = self._now() + IDLE_SECONDS

    def tick(self, now: float) -> None:
        """Passes time on."""
        self._carry_out(self.gathering.tick(now))
        if self._ends is not None and now >= self._ends:
            self.unused()

    def _speaks(self, link: Link, push: Push) -> bool:
        """Returns whether a push is of the worker that has enlisted over its link."""
        enlisted = self._links.get(push.worker) is link
        return enlisted and push.incarnation == link.identity.incarnation

    def forget(self) -> None:
        """The job was started anew: whoever is here belongs to the start before."""
        links, self._links = [*self._links.values()], {}
        for link in links:
            link.close()
        self._enlisted = self._layout = self._sum = self._values = None
        self._reaching = False
        if self._ends is None:
            self._ends = self._now() + IDLE_SECONDS

    # -- inside ---------------------------------------------------------------------------------

    def _enlist(self, link: Link, message: Enlist) -> Message:
        """Lets a worker push here, if it trains what the others do."""
        who = link.identity
        if (who.task, who.incarnation) != (f"worker:{message.worker}", message.incarnation):
            raise FrameError(f"{link.identity.task} enlists worker:{message.worker}")
        if self._enlisted is not None and link.identity.epoch != self.epoch:
            raise FrameError(f"{link.identity.task} has joined another start of the job")
        known = self._enlisted
        try:
            layout = Layout(message.layout)
            message.rule.check_summed(layout.spec.servers)
        except ConfigurationError as error:
            return Refused("rejected", str(error), 0)
        if known is not None and (known.layout, known.rule) != (message.layout, message.rule):
            reason = f"worker:{message.worker} trains something else than worker:{known.worker}"
            return Refused("mismatch", reason, 0)
        if self._layout is None:
            self._layout = layout
        self._enlisted, self.epoch = message, link.identity.epoch
        before = self._links.get(message.worker)
        self._links[message.worker] = link
        if before is not None and before is not link:
            self._carry_out(self.gathering.leave(message.worker))
            before.close()
        self._ends = None
        self.gathering.enlist(message.worker)
        if self._server is None:
            self._reach()
        return Enlisted()

    def _reach(self) -> None:
        """Has the server connected to, unless that is under way."""
        if not self._reaching and self._enlisted is not None:
            self._reaching = True
            self.reach(self._enlisted.server)

    def _heard(
        self, message: Message, number: int, payload: Sequence[memoryview]
    ) -> list[Instruction]:
        """Takes what the server says about a sum."""
        if isinstance(message, PushedTogether):
            values = self._values.vectors if payload and self._values is not None else ()
            return self.gathering.answered(number, message, values)
        if isinstance(message, Refused):
            return self.gathering.refused(number, message)
        if isinstance(message, Waiting):
            self.gathering.waiting(number, message)
            return []
        raise FrameError(f"a server told an aggregator {type(message).__name__}")

    def _place(self, link: Link, message: Message, length: int) -> Sequence[memoryview]:
        if isinstance(message, Push):
            return self._intake.place(link, length)
        if isinstance(message, PushedTogether) and self._layout is not None:
            if self._values is None:
                self._values = PartBuffer(self._layout, 0)
            if length == self._values.nbytes:
                return self._values.views
        raise FrameError(f"{type(message).__name__} has no payload of {length} bytes")

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, SendSum):
                assert self._server is not None
                message = PushTogether(instruction.pushes)
                self._server.offer(message, instruction.total.views, sequence=instruction.number)
                continue
            route = instruction.route
            assert isinstance(route, _Route)
            if not isinstance(instruction.message, Waiting):
                route.staging.busy = False
            payload = self._values.views if instruction.payload and self._values else ()
            route.link.offer(instruction.message, payload, sequence=route.sequence)

    @property
    def _spare(self) -> PartBuffer:
        """Memory for a sum: what the network does not take of it at once is copied."""
        if self._sum is None:
            assert self._layout is not None
            self._sum = PartBuffer(self._layout, 0)
        return self._sum


@dataclass(frozen=True)
class AggregatorConfig:
    """The aggregator of one host.

    Attributes:
        job: the job's id.
        secret: the job's.
        coordinator: the coordinator's address, as every task of the job has it.
        join_timeout: seconds until the first worker must have come.
    """

    job: str
    secret: bytes
    coordinator: str
    join_timeout: float = 300.0


class Aggregator:
    """The aggregator of this host, listening.

    Args:
        config: of which job.

    Attributes:
        address: where it listens.

    Raises:
        AddressInUse: the host has an aggregator for this job already.
        ConfigurationError: there is no shared memory on this system.
    """

    def __init__(self, config: AggregatorConfig) -> None:
        torch.set_grad_enabled(False)
        listener = listen(aggregator_address(config.coordinator))
        self.address = listener.address
        self._handler = AggregatorHandler(join_timeout=config.join_timeout)
        self._service = Service(
            listener,
            [self._handler],
            job=config.job,
            secret=config.secret,
            epoch=None,
            serves=("aggregator:0",),
        )
        self._handler.unused = self._service.stop
        self._upstream = connect_through(self._service, self._handler, config.job, config.secret)

    def run(self) -> None:
        """Serves the workers of this host until they have left, or `stop`."""
        try:
            self._service.run()
        finally:
            self._upstream.close()

    def stop(self) -> None:
        """Ends `run` soon. From any thread, or a signal's handler."""
        self._service.stop()

    @property
    def sums(self) -> tuple[int, int]:
        """How many sums went to the server, and of how many updates."""
        return self._handler.gathering.sums, self._handler.gathering.summed


def connect_through(
    service: Service, handler: AggregatorHandler, job: str, secret: bytes
) -> LeaderLink:
    """Has a handler reach the server over connections that its own service serves.

    Returns:
        What makes the connections; close it when the service has ended.
    """
    upstream = LeaderLink(service, Identity(job, "aggregator:0"), secret)

    def reach(server: str) -> None:
        connected_before = upstream.following
        upstream.follow(ServerEntry(0, 1, server), handler.epoch)
        if connected_before:
            upstream.lost()

    handler.reach, upstream.stale = reach, handler.forget
    return upstream

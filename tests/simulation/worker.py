"""A simulated worker: trains under one incarnation, until it is killed or fenced off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tests.simulation.client import Client
from tests.simulation.expected_values import Violation, push_id
from tests.simulation.invariant_checker import InvariantChecker
from tests.simulation.loop import Process, Start, Task
from tests.simulation.member import Member
from tests.simulation.model import Model
from tests.simulation.network import Network
from tests.simulation.schedule import Crash, Schedule
from tests.simulation.server import Server
from trireme.cluster.view import View, WorkerEntry
from trireme.errors import Fenced, Rejected
from trireme.ps.client.protocol import Copy
from trireme.ps.messages import Span
from trireme.ps.snapshot import ModelState
from trireme.session.backends.local_sgd import period_length

DATASET, SIZE = "examples", 50
_BACK_OFF = 0.02


class Place(Protocol):
    """Where a worker lives."""

    schedule: Schedule
    network: Network
    servers: list[Server]
    checker: InvariantChecker
    model: Model

    @property
    def view(self) -> View:
        """The newest view, whether or not somebody has heard of it."""

    def make_client(
        self, worker: int, incarnation: int, view: Callable[[], View], patience: float = ...
    ) -> Client:
        """Makes a process's connections."""

    def first_state(self) -> ModelState:
        """Returns the values that a chief loads."""

    def crash_of(self, worker: int) -> Crash | None:
        """Returns the crash that is due at this worker's next push."""

    def ended(self, worker: Worker, *, how: str, restart: float | None = None) -> None:
        """A worker is over: it `left`, `crashed`, was `evicted`, or the job was `over`."""

    def copied(self, copy: Copy) -> None:
        """A cut is complete."""


class Worker:
    """One incarnation of a worker.

    Args:
        place: where it lives.
        index: the worker.
        member: its process's membership.
    """

    def __init__(self, place: Place, index: int, member: Member) -> None:
        self.place = place
        self.index = index
        self.member = member
        self.incarnation = member.state.incarnation
        self.client = place.make_client(index, self.incarnation, lambda: member.view)
        self.task = Task(self._live())
        self._spans: list[Span] = []

    def end(self, how: str, restart: float | None = None) -> None:
        """Ends it at once."""
        if not self.task.over:
            self.task.kill()
            self.client.close()
            self.place.ended(self, how=how, restart=restart)

    # -- its life ---------------------------------------------------------------------------------

    def _live(self) -> Process:
        protocol, run = self.client.protocol, self.client.run
        try:
            yield from self._join()
            while not protocol.stopping:
                yield self._think()
                if not self._spans:
                    yield from self._lease()
                yield from self._update()
            chief = self.member.view.chief == self.index
            yield from run(protocol.retire())
            self.client.draining = True
            yield from run(protocol.drain())
            self.client.draining = False
            if chief:
                self.place.copied((yield from run(protocol.snapshot(state=True))))
        except Fenced as fence:
            if self._takes_part(self.place.view):
                raise Violation(f"{self.client.name} gave up: {fence}") from fence
            self.end("evicted")
            return
        except Rejected as error:
            raise Violation(f"{self.client.name} was rejected: {error}") from error
        self.place.checker.check_held((self.index, self.incarnation), self._spans)
        self.end("left")

    def _takes_part(self, view: View) -> bool:
        return WorkerEntry(self.index, self.incarnation) in view.workers

    def _join(self) -> Process:
        """Shows the model; as chief loads the values; pulls them."""
        protocol, run, model = self.client.protocol, self.client.run, self.place.model
        rule = self.place.schedule.rule
        while True:
            try:
                loaded = yield from run(protocol.attach(model.layout.spec, model.optimizer, rule))
                if not loaded and self.member.view.chief == self.index:
                    state = self.place.first_state()
                    yield from run(protocol.load(state, model.loading(state)))
                yield from run(protocol.pull())
                return
            except Fenced as fence:
                if self.member.view.number >= fence.view and not self._takes_part(self.member.view):
                    raise
            yield self.place.network.loop.sleep(_BACK_OFF)

    def _lease(self) -> Process:
        lease = self.client.protocol.lease(DATASET, SIZE, self.place.schedule.batch, 2)
        self._spans = list((yield from self.client.run(lease)))

    def _steps(self, pulled: int) -> int:
        """Returns of how many steps an update is: mostly a whole period, where there are any."""
        rule, rng = self.place.schedule.rule, self.place.network.rng
        if rule.every is None:
            return 1
        most = period_length(rule, pulled, rule.max_steps)
        return most if rng.random() < 0.8 else rng.randint(1, most)

    def _update(self) -> Process:
        """Pushes a gradient, and waits for all verdicts."""
        place, client, protocol = self.place, self.client, self.client.protocol
        rng, model, pulled = place.network.rng, place.model, client.protocol.step
        spans = (self._spans.pop(0),)
        weight = 0.0 if rng.random() < place.schedule.empty else float(place.schedule.batch)
        gradient = model.gradient()
        hyper = model.hyper(place.schedule.rate_at(pulled))
        order = list(range(len(place.servers)))
        rng.shuffle(order)
        if rng.random() < place.schedule.early:
            yield from self._announce(order, weight, hyper, spans)
        steps = self._steps(pulled)
        update = protocol.next_push(weight, hyper, spans, steps=steps)
        protocol.push(update)
        made = push_id(client.identity, update)
        place.checker.make(made, update, spans, gradient)
        crash = place.crash_of(self.index)
        if crash is not None:
            order = order[: crash.reached]
        client.push(update, {server: model.gradient_part(gradient, server) for server in order})
        if crash is not None:
            self.end("crashed", crash.restart)
            yield place.network.loop.sleep(0)  # nobody comes back from here
        if not self._spans and rng.random() < 0.5:
            yield from self._lease()  # before the push is waited for: it is settled first
        yield from client.run(protocol.wait())
        place.checker.acknowledge(made, [reply.verdict for reply in protocol.replies])

    def _announce(
        self, order: Sequence[int], weight: float, hyper: Any, spans: Sequence[Span]
    ) -> Process:
        """Lets a push leave before it is made. It may turn out to be another, or not to come."""
        client, rng = self.client, self.place.network.rng
        if rng.random() < 0.3:
            hyper = self.place.model.hyper(rng.choice((1.0, 2.0)))
        if rng.random() < 0.1:
            weight = 1.0 - weight
        client.announce(client.protocol.next_push(weight, hyper, spans), order)
        yield self._think()
        if rng.random() < 0.1:
            yield from client.run(client.protocol.status())

    def _think(self) -> Start:
        network = self.place.network
        mean = self.place.schedule.think[self.index]
        return network.loop.sleep(network.rng.expovariate(1 / mean))

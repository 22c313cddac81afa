"""A simulated worker process: joins, trains, is killed or fenced off, and comes back."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import msgspec

from trireme.cluster.view import View
from trireme.ps.messages import (
    Attach,
    Attached,
    Drain,
    GroupSpec,
    Lease,
    Leased,
    Load,
    Pull,
    PullReply,
    Push,
    PushReply,
    Refused,
    Retire,
    Span,
)
from trireme.ps.snapshot import ModelState
from trireme.session.averager import period_length
from trireme.simulate.account import Vectors, push_id
from trireme.simulate.client import Client, Request
from trireme.simulate.cuts import Copy, take_cut
from trireme.simulate.loop import Start, Task
from trireme.simulate.model import Model
from trireme.simulate.network import Network
from trireme.simulate.schedule import Crash, Schedule
from trireme.simulate.server import Server
from trireme.simulate.witness import Witness

__all__ = ["DATASET", "Place", "Worker"]

DATASET, SIZE = "examples", 50
_BACK_OFF = 0.02
_TRIES = 200


class Place(Protocol):
    """Where a worker lives."""

    schedule: Schedule
    network: Network
    servers: list[Server]
    witness: Witness
    model: Model

    @property
    def view(self) -> View:
        """The newest view."""

    def make_client(self, name: str, worker: Worker | None) -> Client:
        """Makes a process's connections."""

    def first_state(self) -> ModelState:
        """Returns the values that a chief loads."""

    def crash_of(self, worker: int) -> Crash | None:
        """Returns the crash that is due at this worker's next push."""

    def ended(self, worker: Worker, *, how: str, restart: float | None) -> None:
        """A process is over: it `left`, `crashed`, or was `evicted`."""

    def copied(self, copy: Copy) -> None:
        """A cut is complete."""


class Worker:
    """One process of a worker.

    Args:
        place: where it lives.
        index: the worker.
        incarnation: which start of it this is.
    """

    def __init__(self, place: Place, index: int, incarnation: int) -> None:
        self.place = place
        self.index = index
        self.incarnation = incarnation
        self.view = place.view
        self.client = place.make_client(f"worker:{index}.{incarnation}", self)
        self.task = Task(self._live())
        self._sequence = 0
        self._spans: list[Span] = []
        self._leases = 0
        self._hyper: tuple[GroupSpec, ...] | None = None  # what the servers are known to have

    def hear(self, view: View) -> None:
        """The coordinator's news."""
        if view.number > self.view.number:
            self.view = view

    def fenced(self, number: int) -> bool:
        """A server has fenced this process off; returns whether it still takes part."""
        members = {(entry.index, entry.incarnation) for entry in self.view.workers}
        if (self.index, self.incarnation) in members or self.view.number < number:
            return True
        self.end("evicted", _BACK_OFF)
        return False

    def end(self, how: str, restart: float | None) -> None:
        """Ends this process at once."""
        if not self.task.over:
            self.task.kill()
            self.client.close()
            self.place.ended(self, how=how, restart=restart)

    # -- its life ---------------------------------------------------------------------------------

    def _live(self) -> Generator[Start, Any, None]:
        step, stop = yield from self._join()
        while not stop:
            yield self._think()
            if not self._spans:
                yield from self._lease()
            step, stop = yield from self._update(step)
        me, start = self.index, self.incarnation
        yield self._ask(lambda server: Request(lambda view: Retire(me, start)))
        if self.view.chief == self.index:
            yield from self._save()
        self.place.witness.check_held((me, start), self._spans)
        self.end("left", None)

    def _join(self) -> Generator[Start, Any, tuple[int, bool]]:
        """Shows the model; as chief loads the values; pulls them."""
        me, start, model = self.index, self.incarnation, self.place.model
        rule = self.place.schedule.rule
        while True:
            answers = yield self._ask(
                lambda server: Request(
                    lambda view: Attach(me, start, view, model.layout.spec, model.optimizer, rule)
                )
            )
            loaded = all(_expect(a[0], Attached).loaded for a in answers.values())
            if not loaded and self.view.chief == self.index:
                yield self._ask(self._load(self.place.first_state()))
            answers = yield self._ask(
                lambda server: Request(lambda view: Pull(me, start, view), again=False)
            )
            if not any(isinstance(a[0], Refused) for a in answers.values()):
                replies = [_expect(answers[s][0], PullReply) for s in sorted(answers)]
                return (yield from self._level(replies))
            yield self.place.network.loop.sleep(_BACK_OFF)

    def _load(self, state: ModelState) -> Any:
        me, start = self.index, self.incarnation

        def request(server: int) -> Request:
            tensors = self.place.model.parts_of(state, server)
            specs = tuple(spec for spec, _ in tensors)
            consumed = state.consumed if server == 0 else ()
            return Request(
                lambda view: Load(me, start, view, state.step, specs, state.workers, consumed),
                tensors,
            )

        return request

    def _lease(self) -> Generator[Start, Any, None]:
        me, start, batch = self.index, self.incarnation, self.place.schedule.batch
        self._leases += 1
        number = self._leases
        request = Request(lambda view: Lease(me, start, view, DATASET, SIZE, batch, 2, number))
        answers = yield self.client.ask({0: request})
        self._spans = list(_expect(answers[0][0], Leased).spans)

    def _steps(self, pulled: int) -> int:
        """Returns of how many steps an update is: mostly a whole period, where there are any."""
        rule, rng = self.place.schedule.rule, self.place.network.rng
        if rule.every is None:
            return 1
        most = period_length(rule, pulled, rule.max_steps)
        return most if rng.random() < 0.8 else rng.randint(1, most)

    def _update(self, pulled: int) -> Generator[Start, Any, tuple[int, bool]]:
        """Pushes a gradient, and waits for all verdicts."""
        place, rng = self.place, self.place.network.rng
        self._sequence += 1
        spans = (self._spans.pop(0),)
        weight = 0.0 if rng.random() < place.schedule.empty else float(place.schedule.batch)
        gradient = place.model.gradient()
        hyper = place.model.hyper(place.schedule.rate_at(pulled))
        push = Push(
            self.index,
            self.incarnation,
            0,
            self._sequence,
            self._sequence - 1,
            pulled,
            weight,
            hyper if hyper != self._hyper else None,
            spans,
            steps=self._steps(pulled),
        )
        place.witness.make(push, spans, gradient)
        order = list(range(len(self.client.lanes)))
        rng.shuffle(order)
        crash = place.crash_of(self.index)
        if crash is not None:
            order = order[: crash.reached]
        start = self.client.ask({s: self._pushed(push, gradient, s) for s in order})
        if crash is not None:
            start(lambda answers: None)
            self.end("crashed", crash.restart)
            yield place.network.loop.sleep(0)  # nobody comes back from here
        answers = yield start
        replies = [_expect(answers[s][0], PushReply) for s in sorted(answers)]
        place.witness.acknowledge(push_id(push), [reply.verdict for reply in replies])
        # What a stale update brought along was dropped with it.
        self._hyper = hyper if push_id(push) in place.witness.applied else None
        return (yield from self._level(replies))

    def _pushed(self, push: Push, gradient: Vectors, server: int) -> Request:
        examples = push.examples if server == 0 else ()
        return Request(
            lambda view: msgspec.structs.replace(push, view=view, examples=examples),
            self.place.model.gradient_part(gradient, server),
        )

    def _level(
        self, replies: Sequence[PushReply | PullReply]
    ) -> Generator[Start, Any, tuple[int, bool]]:
        """Brings all parts of the values to the same step, in synchronous modes.

        Returns:
            The step, and whether server 0 has said that the job is over.
        """
        steps, stop = [reply.step for reply in replies], replies[0].stop
        while self.place.schedule.rule.synchronous and len(set(steps)) > 1:
            target = max(steps)
            for server, step in enumerate(steps):
                if step < target:
                    answers = yield self.client.ask({server: self._again(target)})
                    reply = _expect(answers[server][0], PullReply)
                    steps[server] = reply.step
                    stop = stop or (server == 0 and reply.stop)
        return steps[0], stop

    def _again(self, at_least: int) -> Request:
        me, start = self.index, self.incarnation
        return Request(lambda view: Pull(me, start, view, False, at_least))

    def _save(self) -> Generator[Start, Any, None]:
        """As chief, when the job has reached its end: copies its last step."""
        yield self.client.ask({0: Request(lambda view: Drain())})
        for _ in range(_TRIES):
            copy = yield from take_cut(self.client, self.place.network.rng)
            if copy is not None:
                self.place.copied(copy)
                return
            yield self.place.network.loop.sleep(_BACK_OFF * (1 + self.place.network.rng.random()))

    def _ask(self, request: Any) -> Start:
        return self.client.ask({s: request(s) for s in range(len(self.client.lanes))})

    def _think(self) -> Start:
        network = self.place.network
        mean = self.place.schedule.think[self.index]
        return network.loop.sleep(network.rng.expovariate(1 / mean))


def _expect(message: Any, wanted: Any) -> Any:
    assert isinstance(message, wanted), f"{message} came where {wanted.__name__} was due"
    return message

"""A simulated worker: trains under one incarnation, until it is killed or fenced off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from tests.simulation.client import Client
from tests.simulation.expected_values import Made, PushId, Violation
from tests.simulation.invariant_checker import InvariantChecker
from tests.simulation.loop import Process, Start, Task
from tests.simulation.member import Member
from tests.simulation.model import Model, loading
from tests.simulation.network import Network
from tests.simulation.schedule import KEYS, POISON, Crash, Schedule
from trireme.cluster.messages import LastStepSaved
from trireme.cluster.view import LastChief, View, WorkerEntry
from trireme.errors import Fenced, Rejected
from trireme.ps.client.operations import Copy
from trireme.ps.extra import ExtraRequest
from trireme.ps.messages import Push, Span
from trireme.ps.snapshot import ModelState

DATASET, SIZE = "examples", 50
_BACK_OFF = 0.02
_RESTART = 0.3
_LOOKS_AGAIN = 0.05


class Place(Protocol):
    """Where a worker lives."""

    schedule: Schedule
    network: Network
    checker: InvariantChecker
    model: Model

    @property
    def view(self) -> View:
        """The newest view, whether or not somebody has heard of it."""

    def make_client(self, worker: int, member: Member) -> Client:
        """Makes a process's connections."""

    def first_state(self, client: Client) -> ModelState:
        """Returns the values that a chief loads."""

    def make_last_chief(self, worker: int) -> LastChief:
        """Makes what decides whether a worker saves the last step."""

    def crash_of(self, worker: int) -> Crash | None:
        """Returns the crash that is due at this worker's next push."""

    def last_crash_of(self, worker: int) -> Crash | None:
        """Returns the crash that is due when this worker saves the last step."""

    def ended(self, worker: Worker, *, how: str, restart: float | None = None) -> None:
        """A worker is over.

        It `left`, was `dismissed`, has `departed` by a signal, `crashed`, was `evicted`, the job
        was `over`, or it had ended training when the job was rolled back: `late`.
        """

    def copied(self, client: Client, copy: Copy) -> None:
        """A cut is complete."""

    def check_held(self, worker: tuple[int, int], spans: Sequence[Span]) -> None:
        """A worker leaves: what it holds unpushed must be what it thinks it holds."""


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
        self.client = place.make_client(index, member)
        self.task = Task(self._live())
        self.last_chief = place.make_last_chief(index)
        self._spans: list[Span] = []
        self._rows_seen: tuple[int, Any] = (-1, None)  # of which life, and the counts

    def end(self, how: str, restart: float | None = None) -> None:
        """Ends it at once."""
        if not self.task.over:
            self.task.kill()
            self.client.close()
            self.place.ended(self, how=how, restart=restart)

    # -- its life ---------------------------------------------------------------------------------

    def _live(self) -> Process:
        try:
            yield from self._train()
            if self.member.state.dismissed is None and not (yield from self._drain()):
                self.end("late", _RESTART)  # it cannot train on: another process does
                return
        except Fenced as fence:
            if self._takes_part(self.place.view):
                raise Violation(f"{self.client.name} gave up: {fence}") from fence
            self.end("evicted")
            return
        except Rejected as error:
            if not self.place.schedule.poison or "could not be applied" not in str(error):
                raise Violation(f"{self.client.name} was rejected: {error}") from error
            self.place.checker.counts["refused"] += 1
            self.end("crashed", _RESTART)  # by its own update, or by one of the same round
            return
        self.place.check_held((self.index, self.incarnation), self._spans)
        state = self.member.state
        alone = "dismissed" if state.signalled is None else "departed"
        self.end("left" if state.dismissed is None else alone)

    def _train(self) -> Process:
        """Trains until the job has told it to stop; retires."""
        protocol, joined = self.client.protocol, False
        while True:
            try:
                if not joined:
                    self._spans = []
                    yield from self._join()
                    joined = True
                while not protocol.stopping:
                    yield self._think()
                    if self._adds():
                        value = float(self.place.network.rng.randint(1, 1 << 20))
                        yield from self.client.add_late(self.place.model.optimizer, value)
                    if not self._spans:
                        yield from self._lease()
                    yield from self._update()
                    if self.member.state.interrupted is not None and not protocol.stopping:
                        yield from self.client.run(protocol.stop("interrupted"))
                    protocol.stopping = protocol.stopping or self.member.state.dismissed is not None
                self.last_chief.settle(self.member.view.chief == self.index)
                yield from self.client.run(protocol.retire())
                return
            except Fenced as fence:
                if not self._begins_anew(fence):
                    raise
                self.last_chief.reopen()
                joined = False

    def _adds(self) -> bool:
        """Returns whether it adds a parameter now: in rounds at once, else some time later."""
        schedule, client = self.place.schedule, self.client
        if schedule.grows_at is None or client.grown or client.protocol.step < schedule.grows_at:
            return False
        return schedule.rule.synchronous or self.place.network.rng.random() < 0.3

    def _begins_anew(self, fence: Fenced) -> bool:
        """Returns whether a fence means that the shards have no values any more, or not yet."""
        self.place.checker.counts["begun anew"] += 1
        return self.client.lanes.lost or "divided anew before" in str(fence)

    def _drain(self) -> Any:
        """Waits for the end; returns whether all that was learned is there then."""
        protocol, run = self.client.protocol, self.client.run
        self.client.draining = True
        try:
            yield from run(protocol.drain())
            self.client.draining = False
            if not (yield from self._wait_for_chief()):
                return False
            if self.last_chief.saves:
                crash = self.place.last_crash_of(self.index)
                if crash is not None:
                    self.end("crashed", crash.restart)
                    yield self.place.network.loop.sleep(0)  # nobody comes back from here
                copy = yield from run(protocol.snapshot(state=True))
                self.place.copied(self.client, copy)
                self.member.tell((LastStepSaved(self.client.protocol.step),))
        except Fenced as fence:
            if not self._begins_anew(fence):
                raise
            return False
        return True

    def _wait_for_chief(self) -> Any:
        """Waits until the last step is saved, or this worker is to; False after a rollback."""
        before, life = self.last_chief.saves, self.client.life
        step = self.client.protocol.step
        while True:
            self.last_chief.follow(self.member.view, step)
            if not self.last_chief.awaits(self.member.view, step):
                break
            yield self.place.network.loop.sleep(_LOOKS_AGAIN)
            now = self.member.state.incarnation
            if now != self.incarnation and not self._takes_part(self.member.view):
                raise Fenced(f"{self.client.name} was given up", 0)
            if self.member.view.life != life:
                return False
        if self.last_chief.saves and not before:
            self.place.checker.counts["last step taken over"] += 1
        return True

    def _takes_part(self, view: View) -> bool:
        return WorkerEntry(self.index, self.incarnation) in view.workers

    def _join(self) -> Process:
        """Shows the model; as chief loads the values; pulls them."""
        client, protocol, model = self.client, self.client.protocol, self.place.model
        rule = self.place.schedule.rule
        while True:
            try:
                loaded = yield from client.attach(
                    model.optimizer, rule, self.place.schedule.extension
                )
                if not loaded and self.member.view.chief == self.index:
                    state = self.place.first_state(client)
                    yield from client.run(protocol.load(state, loading(client.layout, state)))
                yield from client.run(protocol.pull())
                return
            except Fenced as fence:
                newest = self.member.view
                if (
                    not client.lanes.lost
                    and newest.number >= fence.view
                    and not self._takes_part(newest)
                ):
                    raise
            yield self.place.network.loop.sleep(_BACK_OFF)

    def _lease(self) -> Process:
        lease = self.client.protocol.lease(DATASET, SIZE, self.place.schedule.batch, 2)
        self._spans = list((yield from self.client.run(lease)).spans)

    def _steps(self, pulled: int) -> int:
        """Returns of how many steps an update is: mostly a whole period, where there are any."""
        rule, rng = self.place.schedule.rule, self.place.network.rng
        if rule.every is None:
            return 1
        most = rule.steps_from(pulled)
        return most if rng.random() < 0.8 else rng.randint(1, most)

    def _update(self) -> Process:
        """Pushes a gradient, and waits for all verdicts."""
        place, client, protocol = self.place, self.client, self.client.protocol
        rng, model, pulled = place.network.rng, place.model, client.protocol.step
        spans = (self._spans.pop(0),)
        weight = 0.0 if rng.random() < place.schedule.empty else float(place.schedule.batch)
        gradient = model.gradient(self.index, client.layout)
        hyper = model.hyper(place.schedule.rate_at(pulled))
        if place.schedule.poison and rng.random() < place.schedule.poison:
            weight, hyper = float(place.schedule.batch), model.hyper(POISON)
        steps = self._steps(pulled)
        rows = self._rows()
        update = protocol.next_push(weight, hyper=hyper, examples=spans, steps=steps, extra=rows)
        protocol.push(update)
        who = self._push_id(update)
        whole = () if rows is None else rows.divided((0, 1)).of_shard(0)
        place.checker.make(who, msgspec.structs.replace(update, extra=whole), spans, gradient)
        crash, order = place.crash_of(self.index), self._order()
        if crash is not None:
            order = order[: crash.reached]
        client.push(Made(update, spans, gradient), order)
        if crash is not None:
            self.end("crashed", crash.restart)
            yield place.network.loop.sleep(0)  # nobody comes back from here
        if not self._spans and rng.random() < 0.5:
            yield from self._lease()  # before the push is waited for: it is settled first
        yield from client.run(protocol.wait())
        place.checker.acknowledge(who, [reply.verdict for reply in protocol.replies])
        if rows is not None:
            self._check_rows(client.life, protocol.brought or ())
            if rng.random() < 0.3:
                yield from self._pull_rows()

    def _pull_rows(self) -> Process:
        """Reads all rows, which another worker may be updating."""
        life, request = self.client.life, request_for_rows()
        rows = yield from self.client.run(self.client.protocol.pull_extra(request))
        if self.client.life == life:
            self.place.checker.counts["rows pulled"] += 1
            self._check_rows(life, rows)

    def _check_rows(self, life: int, brought: Sequence[Any]) -> None:
        """Checks that rows are no smaller than those that this worker saw before.

        Counts only grow: what a worker has seen once can get lost with no server.
        """
        for rows in brought:
            seen_in, seen = self._rows_seen
            if seen_in == life and (rows < seen).any():
                name = self.client.name
                raise Violation(f"{name} sees the rows {rows.ravel()} after {seen.ravel()}")
            self._rows_seen = life, rows.copy()

    def _rows(self) -> ExtraRequest | None:
        """Returns a request to update some rows of the table, and for all rows."""
        if self.place.schedule.extension is None:
            return None
        rng = self.place.network.rng
        touched = np.array(sorted(rng.sample(KEYS, rng.randint(0, 5))), np.int64)
        counts = np.array([rng.randint(1, 9) for _ in touched], np.int64)
        return request_for_rows((touched, counts.reshape(-1, 1)))

    def _push_id(self, update: Push) -> PushId:
        return self.index, self.incarnation, update.sequence, self.client.life

    def _order(self) -> list[int]:
        """Returns all shards, in the order in which their messages happen to leave."""
        order = list(range(self.client.layout.spec.shards))
        self.place.network.rng.shuffle(order)
        return order

    def _think(self) -> Start:
        network, means = self.place.network, self.place.schedule.think
        mean = means[self.index % len(means)]
        return network.loop.sleep(network.rng.expovariate(1 / mean))


def request_for_rows(update: tuple[Any, Any] | None = None) -> ExtraRequest:
    """Returns a request for all rows of the table, that updates some: their keys, and counts."""
    from trireme.tables.job.requests import RowKeys, RowRequest, RowUpdates
    from trireme.tables.table_spec import Add, TableSpec

    updates = () if update is None else (RowUpdates(0, *update),)
    wanted = (RowKeys(0, np.array(KEYS, np.int64)),)
    return RowRequest((TableSpec("counts", 1, Add(), "int64"),), updates, wanted)

"""One simulated job: its servers, workers and coordinator, from its first view to its end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.simulation.client import Client
from tests.simulation.coordinator import Coordinator
from tests.simulation.expected_values import Violation
from tests.simulation.invariant_checker import InvariantChecker
from tests.simulation.loop import Loop, Process, Task
from tests.simulation.model import Model
from tests.simulation.network import Network
from tests.simulation.schedule import Crash, Schedule
from tests.simulation.server import Link, Peering, Server
from tests.simulation.worker import DATASET, SIZE, Worker
from trireme.cluster.view import View, WorkerEntry
from trireme.errors import Rejected, WaitTimeout
from trireme.ps.client.lanes import Lanes
from trireme.ps.client.protocol import ClientProtocol, Copy
from trireme.ps.messages import (
    Lease,
    Leased,
    ServerStatus,
    Status,
)
from trireme.ps.server.dispatcher import Dispatcher
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.values.parameters import ValuesFactory
from trireme.ps.snapshot import ModelState, assemble
from trireme.wire.handshake import Identity

__all__ = ["Makers", "World", "answer_in", "joined"]

PATIENCE = 300.0
"""How long after the last fault everything must be over, in virtual seconds."""

_DETECTION = 0.5
_SAVERS = 1000  # processes that train nothing are workers beyond all others


@dataclass(frozen=True)
class Makers:
    """What the servers and clients of a job are made by."""

    shard: Callable[[int, ValuesFactory], Shard] = Shard
    dispatcher: Callable[[Shard], Dispatcher[Link]] = Dispatcher
    lanes: Callable[..., Lanes] = Lanes
    protocol: Callable[..., ClientProtocol] = ClientProtocol


class World:
    """One job.

    Args:
        schedule: what happens in it.
        makers: of its parts.
        start: the state that it goes on from.
        note: told what happens, line by line.

    Attributes:
        last: the last state that was copied from it.
    """

    def __init__(
        self,
        schedule: Schedule,
        makers: Makers,
        start: ModelState | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.schedule = schedule
        self.loop = Loop(note)
        self.rng = random.Random(schedule.seed)
        self.network = Network(self.loop, self.rng, schedule.weather)
        self.model = Model(schedule.servers, schedule.momentum, schedule.seed)
        self.checker = InvariantChecker(schedule, self.model.layout, start or ModelState(0, {}))
        self.last: ModelState | None = None
        self._makers = makers
        self._start = start
        self.servers = [
            Server(
                index,
                makers.shard(index, self.checker.make_values),
                self.network,
                self.checker,
                makers.dispatcher,
            )
            for index in range(schedule.servers)
        ]
        for follower in self.servers[1:]:
            Peering(self.network, self.servers[0], follower)
        self._coordinator = Coordinator(self.loop, self.rng, schedule.servers, schedule.view_delay)
        self._workers: dict[int, Worker] = {}
        self._launched = 0
        self._coming = 0  # processes that are about to start, and cuts under way
        self._crashes = list(schedule.crashes)
        self._pushes: Counter[int] = Counter()
        self._finished = False

    @property
    def view(self) -> View:
        """The newest view."""
        return self._coordinator.view

    def run(self) -> Counter[str]:
        """Runs the job to its end; returns how often what happened.

        Raises:
            Violation: something happened that must not, or somebody waits for ever.
        """
        for server in self.servers:
            self._coordinator.subscribe(server.view)
            self.loop.after(1.0, server.tick)
        self._coordinator.form(self.schedule.workers)
        for worker in range(self.schedule.workers):
            self._begin(worker, 1)
        self._plan()
        deadline = max(self.schedule.weather.calm_from, 10.0) + PATIENCE
        if not self.loop.run(until=deadline, done=self._is_over):
            raise Violation(f"after {self.loop.now:.0f} s somebody still waits: {self._waiting()}")
        self._settle()
        self._check_end()
        self.checker.counts["broken"] = self.network.broken
        return self.checker.counts

    # -- what is planned --------------------------------------------------------------------------

    def _plan(self) -> None:
        for eviction in self.schedule.evictions:
            self.loop.at(eviction.at, partial(self._evict, eviction.worker))
        for at in self.schedule.cuts:
            self._launch(at, self._save)
        if self.schedule.vanishing is not None:
            self._launch(self.schedule.vanishing, self._vanish)
        if self.schedule.stop_at is not None:
            self._launch(self.schedule.stop_at, self._stop)

    def _launch(self, at: float, live: Callable[[Client], Process]) -> None:
        self._coming += 1
        self._launched += 1
        client = self.make_client(_SAVERS + self._launched, 1, lambda: self.view, patience=0.5)
        task = Task(live(client), self._done)
        self.loop.at(at, task.begin)

    def _done(self) -> None:
        self._coming -= 1

    def _save(self, client: Client) -> Process:
        with suppress(Rejected, WaitTimeout):  # there may be no values yet
            self.copied((yield from client.run(client.protocol.snapshot(state=True))))

    def _vanish(self, client: Client) -> Process:
        with suppress(Rejected):
            yield from client.run(client.protocol.freeze(self.rng.getrandbits(53)))
        client.close()

    def _stop(self, client: Client) -> Process:
        yield from client.run(client.protocol.stop("asked to"))

    def _evict(self, worker: int) -> None:
        process = self._workers.get(worker)
        if process is not None:
            self.checker.lost.add((worker, process.incarnation))
            self.checker.counts["evictions"] += 1
            self._coordinator.drop(worker, process.incarnation)

    # -- what workers ask of the place where they live --------------------------------------------

    def make_client(
        self, worker: int, incarnation: int, view: Callable[[], View], patience: float = 1800.0
    ) -> Client:
        """Makes a process's connections."""
        servers, makers = len(self.servers), self._makers
        return Client(
            Identity("", f"worker:{worker}", incarnation),
            self.network,
            self.servers,
            makers.protocol(worker, servers, patience_seconds=patience, rng=self.rng),
            makers.lanes(worker, incarnation, servers, retry_seconds=30.0, patience_seconds=1800.0),
            view,
            levels=self.schedule.rule.synchronous,
        )

    def first_state(self) -> ModelState:
        """Returns the values that a chief loads."""
        return self._start if self._start is not None else self.model.first_state()

    def crash_of(self, worker: int) -> Crash | None:
        """Returns the crash that is due at this worker's next push."""
        self._pushes[worker] += 1
        for crash in self._crashes:
            if (crash.worker, crash.push) == (worker, self._pushes[worker]):
                self._crashes.remove(crash)
                return crash
        return None

    def ended(self, worker: Worker, *, how: str, restart: float | None) -> None:
        """A process is over."""
        del self._workers[worker.index]
        if self.loop.note is not None:
            self.loop.note(f"{self.loop.now:8.4f} {worker.client.name} {how}")
        if how == "left":
            self._finished = True
            self._coordinator.drop(worker.index, worker.incarnation)
            return
        self.checker.counts[how] += 1
        self.checker.lost.add((worker.index, worker.incarnation))
        self._coming += 1
        self.loop.after(self.rng.uniform(0, _DETECTION), lambda: self._notice(worker))
        if restart is not None:
            self._coming += 1
            self.loop.after(restart, lambda: self._restart(worker.index))

    def copied(self, copy: Copy) -> None:
        """A cut is complete: what it holds can be loaded anywhere."""
        self.checker.check_cut([snapshot for snapshot, _ in copy])
        self.last = joined(self.model, copy)

    def _notice(self, worker: Worker) -> None:
        self._coming -= 1
        self._coordinator.drop(worker.index, worker.incarnation)

    def _restart(self, worker: int) -> None:
        self._coming -= 1
        self._begin(worker, self._coordinator.join(worker))

    def _begin(self, worker: int, incarnation: int) -> None:
        process = Worker(self, worker, incarnation)
        self._workers[worker] = process
        self._coordinator.subscribe(process.hear)
        self.loop.after(self.rng.uniform(0, 0.05), process.task.begin)

    # -- the end ----------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return not self._workers and not self._coming

    def _settle(self) -> None:
        """Lets everything arrive that is still on its way."""
        self.loop.run(until=self.loop.now + 5.0, done=lambda: False)

    def _waiting(self) -> str:
        waiting = [
            f"{worker.client.name} for ps:{lane.index} ({lane.request.build(0)})"
            for worker in self._workers.values()
            for lane in worker.client.lanes.waiting
            if lane.request is not None
        ]
        return "; ".join(waiting) or f"{self._coming} who are not workers"

    def _check_end(self) -> None:
        tables = []
        for server in self.servers:
            status = answer_in(server.shard.status(self.loop.now, None, Status()), ServerStatus)
            tables.append(status.workers)
        counted = self.servers[0].shard.state.counters["half_applied"]
        self.checker.check_end(tables, finished=self._finished, half_applied=counted)
        if self.servers[0].shard.state.loaded:
            self._check_rest()

    def _check_rest(self) -> None:
        """A newcomer takes the job over: it must be dealt all that nobody finished."""
        shard, newcomer = self.servers[0].shard, self.schedule.workers
        number = self.view.number + 1
        now = self.loop.now
        shard.view(now, View(number, self.view.servers, (WorkerEntry(newcomer, 1),)))
        count = self.checker.dealing.frontier - len(self.checker.dealing.applied) + 3
        lease = Lease(number, DATASET, SIZE, 1, count)
        leased = answer_in(shard.lease(now, None, Participant(newcomer, 1), lease), Leased)
        self.checker.dealing.check_rest(leased.spans)


def joined(model: Model, copy: Copy) -> ModelState:
    """Returns the state that a copy of all servers is."""
    parts = [(cut, list(zip(cut.tensors, payload, strict=True))) for cut, payload in copy]
    return assemble(model.layout, parts)


def answer_in(instructions: Sequence[Any], wanted: Any) -> Any:
    """Returns the answer of a type that must be among instructions.

    Raises:
        Violation: it is not.
    """
    for instruction in instructions:
        if isinstance(instruction, Reply) and isinstance(instruction.message, wanted):
            return instruction.message
    raise Violation(f"{instructions} came where {wanted.__name__} was due")

"""One simulated job: its servers, workers and coordinator, from its first view to its end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from trireme.cluster.view import View, WorkerEntry
from trireme.ps.instructions import Reply
from trireme.ps.messages import (
    Lease,
    Leased,
    ServerStatus,
    Status,
    StopJob,
)
from trireme.ps.shard import Shard
from trireme.ps.snapshot import ModelState, assemble
from trireme.ps.values import ValuesFactory
from trireme.simulate.account import Violation
from trireme.simulate.client import Client, Request
from trireme.simulate.coordinator import Coordinator
from trireme.simulate.cuts import Copy, freeze, take_cut
from trireme.simulate.loop import Loop, Process, Task
from trireme.simulate.model import Model
from trireme.simulate.network import Network
from trireme.simulate.schedule import Crash, Schedule
from trireme.simulate.server import Peering, Server
from trireme.simulate.witness import Witness
from trireme.simulate.worker import DATASET, SIZE, Worker

__all__ = ["Makers", "World", "answer_in"]

PATIENCE = 300.0
"""How long after the last fault everything must be over, in virtual seconds."""

_TRIES = 20
_BACK_OFF = 0.02
_DETECTION = 0.5


@dataclass(frozen=True)
class Makers:
    """What the servers and clients of a job are made by."""

    shard: Callable[[int, ValuesFactory], Shard] = Shard
    server: Callable[..., Server] = Server
    client: Callable[..., Client] = Client


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
        self.witness = Witness(schedule, self.model.layout, start or ModelState(0, {}))
        self.last: ModelState | None = None
        self._makers = makers
        self._start = start
        self.servers = [
            makers.server(
                index, makers.shard(index, self.witness.make_values), self.network, self.witness
            )
            for index in range(schedule.servers)
        ]
        for follower in self.servers[1:]:
            Peering(self.network, self.servers[0], follower)
        self._coordinator = Coordinator(self.loop, self.rng, schedule.servers, schedule.view_delay)
        self._workers: dict[int, Worker] = {}
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
        self.witness.counts["broken"] = self.network.broken
        return self.witness.counts

    # -- what is planned --------------------------------------------------------------------------

    def _plan(self) -> None:
        for eviction in self.schedule.evictions:
            self.loop.at(eviction.at, partial(self._evict, eviction.worker))
        for number, at in enumerate(self.schedule.cuts):
            self._launch(at, f"saver:{number}", self._save)
        if self.schedule.vanishing is not None:
            self._launch(self.schedule.vanishing, "vanishing", self._vanish)
        if self.schedule.stop_at is not None:
            self._launch(self.schedule.stop_at, "stopper", self._stop)

    def _launch(self, at: float, name: str, live: Callable[[Client], Process]) -> None:
        client = self.make_client(name, None)
        self._coming += 1
        task = Task(live(client), self._done)
        self.loop.at(at, task.begin)

    def _done(self) -> None:
        self._coming -= 1

    def _save(self, client: Client) -> Process:
        for _ in range(_TRIES):
            copy = yield from take_cut(client, self.rng)
            if copy is not None:
                self.copied(copy)
                return
            yield self.loop.sleep(_BACK_OFF * (1 + self.rng.random()))

    def _vanish(self, client: Client) -> Process:
        yield from freeze(client, self.rng.getrandbits(53))
        client.close()

    def _stop(self, client: Client) -> Process:
        yield client.ask({0: Request(lambda view: StopJob("asked to"))})

    def _evict(self, worker: int) -> None:
        process = self._workers.get(worker)
        if process is not None:
            self.witness.lost.add((worker, process.incarnation))
            self.witness.counts["evictions"] += 1
            self._coordinator.drop(worker, process.incarnation)

    # -- what workers ask of the place where they live --------------------------------------------

    def make_client(self, name: str, worker: Worker | None) -> Client:
        """Makes a process's connections."""
        if worker is None:
            return self._makers.client(name, self.network, self.servers, lambda: self.view)
        return self._makers.client(
            name, self.network, self.servers, lambda: worker.view, worker.fenced
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
        self.witness.counts[how] += 1
        self.witness.lost.add((worker.index, worker.incarnation))
        self._coming += 1
        self.loop.after(self.rng.uniform(0, _DETECTION), lambda: self._notice(worker))
        if restart is not None:
            self._coming += 1
            self.loop.after(restart, lambda: self._restart(worker.index))

    def copied(self, copy: Copy) -> None:
        """A cut is complete: what it holds can be loaded anywhere."""
        self.witness.check_cut([snapshot for snapshot, _ in copy])
        self.last = assemble(self.model.layout, copy)

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
            f"{worker.client.name} for ps:{server} ({lane.request.build(0)})"
            for worker in self._workers.values()
            for server, lane in enumerate(worker.client.lanes)
            if lane.request is not None
        ]
        return "; ".join(waiting) or f"{self._coming} who are not workers"

    def _check_end(self) -> None:
        tables = []
        for server in self.servers:
            status = answer_in(server.shard.status(self.loop.now, None, Status()), ServerStatus)
            tables.append(status.workers)
        self.witness.check_end(tables, finished=self._finished)
        if self.servers[0].shard.loaded:
            self._check_rest()

    def _check_rest(self) -> None:
        """A newcomer takes the job over: it must be dealt all that nobody finished."""
        shard, newcomer = self.servers[0].shard, self.schedule.workers
        number = self.view.number + 1
        now = self.loop.now
        shard.view(now, View(number, self.view.servers, (WorkerEntry(newcomer, 1),)))
        count = self.witness.dealing.frontier - len(self.witness.dealing.applied) + 3
        lease = Lease(newcomer, 1, number, DATASET, SIZE, 1, count)
        leased = answer_in(shard.lease(now, None, lease), Leased)
        self.witness.dealing.check_rest(leased.spans)


def answer_in(instructions: Sequence[Any], wanted: Any) -> Any:
    """Returns the answer of a type that must be among instructions.

    Raises:
        Violation: it is not.
    """
    for instruction in instructions:
        if isinstance(instruction, Reply) and isinstance(instruction.message, wanted):
            return instruction.message
    raise Violation(f"{instructions} came where {wanted.__name__} was due")

"""One simulated job: its servers, workers and coordinator, from the first to join to its end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.simulation.client import Client
from tests.simulation.coordinator import Coordinator, Decide
from tests.simulation.expected_values import Violation
from tests.simulation.invariant_checker import InvariantChecker
from tests.simulation.loop import Loop, Process, Task
from tests.simulation.member import Member
from tests.simulation.model import Model
from tests.simulation.network import Network, Weather
from tests.simulation.schedule import Crash, Schedule
from tests.simulation.server import Link, Peering, Server
from tests.simulation.worker import DATASET, SIZE, Worker
from trireme.cluster.member_protocol import MemberProtocol
from trireme.cluster.membership import step
from trireme.cluster.messages import JobOver
from trireme.cluster.state import Policy
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
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.values.parameters import ValuesFactory
from trireme.ps.snapshot import ModelState, assemble
from trireme.wire.handshake import Identity

PATIENCE = 300.0
"""How long after the last fault everything must be over, in virtual seconds."""

_RESTART = 0.3  # seconds until a process that was not admitted is started again
_SAVERS = 1000  # processes that train nothing are workers beyond all others


@dataclass(frozen=True)
class Makers:
    """What the servers, clients and members of a job are made by, and who decides who they are."""

    shard: Callable[[int, ValuesFactory], Shard] = Shard
    dispatcher: Callable[[Shard], Dispatcher[Link]] = Dispatcher
    lanes: Callable[..., Lanes] = Lanes
    protocol: Callable[..., ClientProtocol] = ClientProtocol
    member: Callable[..., MemberProtocol] = MemberProtocol
    membership: Decide = step


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
        self._members_network = Network(self.loop, self.rng, _weather_of_members(schedule))
        self._policy = _policy(schedule)
        self._coordinator = Coordinator(
            self._members_network, self._policy, makers.membership, self._lost
        )
        self._members: dict[int, Member] = {}  # by worker: of the process that lives
        self._workers: dict[int, Worker] = {}  # those that train
        self._launched = 0
        self._coming = 0  # processes that are about to start, and cuts under way
        self._crashes = list(schedule.crashes)
        self._pushes: Counter[int] = Counter()
        self._finished = False

    @property
    def view(self) -> View:
        """The newest view, whether or not somebody has heard of it."""
        return self._coordinator.view

    def run(self) -> Counter[str]:
        """Runs the job to its end; returns how often what happened.

        Raises:
            Violation: something happened that must not, or somebody waits for ever.
        """
        self._coordinator.tick()
        for server in self.servers:
            self._member("ps", server.index, partial(_tell, server)).connect()
            self.loop.after(1.0, server.tick)
        for worker in range(self.schedule.workers):
            self.loop.after(self.rng.uniform(0, 0.05), partial(self._begin, worker))
        self._coming += self.schedule.workers
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
        self._when_formed(at, task.begin)

    def _when_formed(self, at: float, begin: Callable[[], None]) -> None:
        """Has a function called at a time, or somewhat later if there is no view yet."""

        def call() -> None:
            if self.view.number or self._coordinator.done:
                begin()
            else:
                self.loop.after(0.1, call)

        self.loop.at(at, call)

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
        member = self._members.get(worker)
        if member is not None:
            member.fall_silent(self._policy.heartbeat_timeout * self.rng.uniform(0.8, 1.5))

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
            partial(
                makers.lanes,
                worker,
                incarnation,
                servers,
                view,
                retry_seconds=30.0,
                patience_seconds=1800.0,
            ),
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

    def ended(self, worker: Worker, *, how: str, restart: float | None = None) -> None:
        """A worker is over."""
        del self._workers[worker.index]
        self._note(f"{worker.client.name} {how}")
        self.checker.counts[how] += 1
        if how == "left":
            self._finished = True
            worker.member.leave("finished" if self.schedule.stop_at is None else "interrupted")
            del self._members[worker.index]
            return
        self.checker.lost.add((worker.index, worker.incarnation))
        if how == "evicted":
            self._train(worker.index)
        elif how == "crashed":
            self._end_process(worker.index, restart)

    def _note(self, what: str) -> None:
        if self.loop.note is not None:
            self.loop.note(f"{self.loop.now:8.4f} {what}")

    def copied(self, copy: Copy) -> None:
        """A cut is complete: what it holds can be loaded anywhere."""
        self.checker.check_cut([snapshot for snapshot, _ in copy])
        self.last = joined(self.model, copy)

    # -- processes --------------------------------------------------------------------------------

    def _member(self, role: str, index: int, hear: Callable[[View | JobOver], None]) -> Member:
        return Member(
            self._members_network, self._coordinator, role, index, self._makers.member, hear
        )

    def _begin(self, worker: int) -> None:
        """A process of a worker starts, and joins."""
        self._coming -= 1
        member = self._member("worker", worker, lambda news: self._heard(worker, member, news))
        self._members[worker] = member
        member.connect()

    def _heard(self, worker: int, member: Member, news: View | JobOver) -> None:
        if self._members.get(worker) is not member:
            return
        if isinstance(news, View):
            self._train(worker)
        elif worker in self._workers:
            self._workers[worker].end("over")
            self._end_process(worker, None)
        else:
            refused = member.state.failure is not None
            self._end_process(worker, _RESTART if refused else None)

    def _train(self, worker: int) -> None:
        """A process that is in the view, and does not train yet or any longer, begins to."""
        member = self._members[worker]
        if worker in self._workers or not member.takes_part:
            return
        trains = self._workers[worker] = Worker(self, worker, member)
        self.loop.after(self.rng.uniform(0, 0.05), trains.task.begin)

    def _end_process(self, worker: int, restart: float | None) -> None:
        """A process ends; another one may be started after so many seconds."""
        self._members.pop(worker).close()
        if restart is not None:
            self._coming += 1
            self.loop.after(restart, partial(self._begin, worker))

    def _lost(self, worker: int, incarnation: int) -> None:
        """The coordinator has given a worker up."""
        self.checker.lost.add((worker, incarnation))
        process = self._workers.get(worker)
        if process is not None and process.incarnation == incarnation:
            self.checker.counts["evictions"] += 1

    # -- the end ----------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return not self._members and not self._coming and self._coordinator.done

    def _settle(self) -> None:
        """Lets everything arrive that is still on its way."""
        self.loop.run(until=self.loop.now + 5.0, done=lambda: False)

    def _waiting(self) -> str:
        waiting = [
            f"{worker.client.name} for ps:{lane.index} ({lane.request.message})"
            for worker in self._workers.values()
            for lane in worker.client.lanes.waiting
            if lane.request is not None
        ]
        members = "; ".join(map(str, self._coordinator.state.tasks.values()))
        return "; ".join(waiting) or f"{self._coming} who are not workers, or {members}"

    def _check_end(self) -> None:
        self._check_outcome()
        tables = []
        for server in self.servers:
            status = answer_in(server.shard.status(self.loop.now, None, Status()), ServerStatus)
            tables.append(status.workers)
        counted = self.servers[0].shard.state.counters["half_applied"]
        self.checker.check_end(tables, finished=self._finished, half_applied=counted)
        if self.servers[0].shard.state.loaded:
            self._check_rest()

    def _check_outcome(self) -> None:
        """Where every worker has said how it ended, the job ended so."""
        state = self._coordinator.state
        assert state.over is not None
        self.checker.counts[f"job {state.over.outcome}"] += 1
        said = {task.outcome for task in state.of("worker") if task.state == "left"}
        if said and all(task.state in ("left", "expected") for task in state.tasks.values()):
            expected = "interrupted" if "interrupted" in said else "finished"
            if state.over.outcome != expected:
                raise Violation(f"the workers ended {said}, and the job so: {state.over}")

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


def _tell(server: Server, news: View | JobOver) -> None:
    if isinstance(news, View):
        server.view(news)


def _policy(schedule: Schedule) -> Policy:
    """Returns how long tasks may be silent: longer than a message and its answer take."""
    timeout = 0.3 + 1.2 * schedule.view_delay
    return Policy(
        workers=schedule.workers,
        servers=schedule.servers,
        heartbeat_interval=timeout / 3,
        heartbeat_timeout=timeout,
        reconnect_grace=0.3,
        end_grace=2.0,
        wait_for_restart=5.0,
        progress_timeout=0.0,
    )


def _weather_of_members(schedule: Schedule) -> Weather:
    """Returns the weather between the tasks and the coordinator: it breaks no server's grace."""
    return Weather(
        breaks=schedule.weather.breaks / 5,
        calm_from=schedule.weather.calm_from,
        lag=schedule.view_delay,
    )


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

"""One simulated job: its servers, workers and coordinator, from the first to join to its end."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from tests.simulation import final_checks
from tests.simulation.backups_checker import check_verdict_at_backups
from tests.simulation.client import Client
from tests.simulation.coordinator import CoordinatorHost
from tests.simulation.expected_values import Vectors, Violation
from tests.simulation.faults import Faults
from tests.simulation.invariant_checker import InvariantChecker
from tests.simulation.launcher import Launcher
from tests.simulation.loop import Loop, Process, Task
from tests.simulation.makers import Makers
from tests.simulation.member import Member
from tests.simulation.model import Model, layout_over
from tests.simulation.network import Network, Weather
from tests.simulation.notice_checker import NoticeChecker
from tests.simulation.process import Process as OsProcess
from tests.simulation.schedule import Crash, Schedule
from tests.simulation.server import Server
from tests.simulation.shard_checker import ShardChecker
from tests.simulation.shard_watch import watched
from tests.simulation.worker import Worker
from trireme.cluster.member_protocol import MemberProtocol
from trireme.cluster.state import Policy, State
from trireme.cluster.view import LastChief, View
from trireme.errors import Fenced, Rejected, WaitTimeout
from trireme.ps.client.lanes import ClientOptions, Lanes
from trireme.ps.client.operations import Copy
from trireme.ps.messages import PushReply, Span
from trireme.ps.replication.dispatcher import Dispatcher
from trireme.ps.snapshot import ModelState
from trireme.ps.snapshot_messages import Snapshot, TakeSnapshot
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

PATIENCE = 300.0
"""How long after the last fault everything must be over, in virtual seconds."""

_SAVERS = 1000  # processes that train nothing are workers beyond all others


class World:
    """One job.

    Args:
        schedule: what happens in it.
        makers: of its parts.
        start: the state that it goes on from.
        note: told what happens, line by line.

    Attributes:
        last: the last state that was copied from it.
        last_at: when it was.
        fails: whether the job may fail, because it does not survive what happens to it.
        patience: as of `Cluster`.
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
        self.members_network = Network(self.loop, self.rng, _weather_of_members(schedule))
        self.model = Model(schedule.momentum, schedule.seed, counts=schedule.counts)
        self.checker = InvariantChecker(schedule, layout_over)
        self.counts: Counter[str] = self.checker.counts
        self.last: ModelState | None = None
        self._last_made = (0, 0)  # of which life and step
        self.last_at = 0.0
        self.fails = False
        self.policy = _policy(schedule)
        self.patience = self.policy.heartbeat_timeout if schedule.links else math.inf
        self.coordinator = CoordinatorHost(self.members_network, self.policy, self._viewed)
        self.launcher = Launcher(self)
        self.watches: dict[int, ShardChecker] = {}  # by the identity of the shard
        self._makers = makers
        self._start = start
        self._coming = 0  # who is about to start beside workers, and cuts under way
        self._launched = 0
        self._crashes = list(schedule.crashes)
        self._pushes: Counter[int] = Counter()
        self._seen: set[tuple[int, int]] = set()  # life and shard, of which a worker has values

    @property
    def view(self) -> View:
        """The newest view, whether or not somebody has heard of it."""
        return self.coordinator.view

    def run(self) -> Counter[str]:
        """Runs the job to its end; returns how often what happened.

        Raises:
            Violation: something happened that must not, or somebody waits for ever.
        """
        with ExitStack() as patches:
            patches.enter_context(self.coordinator.deciding(self._makers.membership))
            for patch in self._makers.patches:
                patches.enter_context(patch())
            self._run()
        self.counts["broken"] = self.network.broken
        self.counts["lives"] = 1 + self.view.life
        self.counts["seen"] = self.checker.counting.observations
        return self.counts

    def _run(self) -> None:
        self.coordinator.begin()
        for server in range(self.schedule.servers):
            self.launcher.start_server(server)
        for worker in range(self.schedule.workers):
            self.launcher.start_worker(worker, self.rng.uniform(0, 0.05))
        self._plan()
        deadline = max(self.schedule.weather.calm_from, 10.0) + PATIENCE
        if not self.loop.run(until=deadline, done=self._is_over):
            raise Violation(f"after {self.loop.now:.0f} s somebody still waits: {self._waiting()}")
        self.loop.run(until=self.loop.now + 5.0, done=lambda: False)  # what is still on its way
        final_checks.check(self)

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
        Faults(self).plan()
        if self.schedule.links:
            NoticeChecker(self).begin()

    def _launch(self, at: float, live: Callable[[Client], Process]) -> None:
        """Starts a process that trains nothing at a time, or later if there is no view yet."""
        self._coming += 1

        def call() -> None:
            if self.coordinator.done or self.coordinator.state.over is not None:
                self._coming -= 1
            elif self.view.shards:
                self._launched += 1
                who = Identity("", f"worker:{_SAVERS + self._launched}", 1, "e")
                client = self._client(who, OsProcess(self.loop), lambda: self.view, patience=0.5)
                Task(self._guarded(live, client), self._done).begin()
            else:
                self.loop.after(0.1, call)

        self.loop.at(at, call)

    def _guarded(self, live: Callable[[Client], Process], client: Client) -> Process:
        try:
            yield from live(client)
        except Fenced:  # the shards were divided anew, or all copies were lost meanwhile
            self._launch(self.loop.now + 0.1, live)
        except Violation:
            if self.coordinator.state.over is None:  # else the servers may be gone
                raise
        client.close()

    def _done(self) -> None:
        self._coming -= 1

    def _save(self, client: Client) -> Process:
        with suppress(Rejected, WaitTimeout):  # there may be no values yet
            copy = yield from client.run(client.protocol.snapshot(state=True))
            self.copied(client, copy)

    def _vanish(self, client: Client) -> Process:
        shards = range(client.layout.spec.shards)
        some = self.rng.sample(shards, self.rng.randint(1, len(shards)))
        client.send(TakeSnapshot(self.rng.getrandbits(53), True), some)
        yield self.loop.sleep(0.5)  # until the requests have arrived

    def _stop(self, client: Client) -> Process:
        statuses = yield from client.run(client.protocol.status())
        shards = range(len(statuses))
        # A status is said before the copies have what it says.
        if not all((client.life, shard) in self._seen for shard in shards):
            raise Fenced("training has not begun", 0)
        if self.coordinator.state.over is not None:
            return  # it ends where it is
        yield from client.run(client.protocol.stop("asked to"))

    def _evict(self, worker: int) -> None:
        member = self.launcher.members.get(worker)
        if member is not None:
            member.fall_silent(self.policy.heartbeat_timeout * self.rng.uniform(0.8, 1.5))

    # -- what servers ask of the place where they live --------------------------------------------

    def server_at(self, address: str) -> Server | None:
        """Returns the process that listens at an address."""
        return self.launcher.server_at(address)

    def server_ended(self, server: Server, why: str) -> None:
        """A server's process has ended by itself."""
        self.launcher.server_ended(server, why)

    def make_dispatcher(self, server: Server, number: int) -> Dispatcher[Any]:
        """Makes an empty shard, which is watched, with its dispatcher."""
        watch = self.checker.watch(f"ps:{server.index}, pid {server.pid}", number)
        shard = watched(self._makers.shard)(number, watch.make_values)
        shard.watch = watch  # type: ignore[attr-defined]
        return self._makers.dispatcher(shard)

    def make_member(self, *said: Any) -> MemberProtocol:
        """Makes a process's membership."""
        return self._makers.member(*said)

    def answered(self, server: Server, shard: int, task: Identity, message: Message) -> None:
        """A server answers a task about a shard."""
        view = server.handler.replicas.view
        self.checker.answered(server.index, shard, view)
        if isinstance(message, PushReply) and view.shards:
            entries = [view.server(index) for index in view.shards[shard].backups]
            backups = [self.server_at(entry.address) for entry in entries if entry is not None]
            tables = [each.table(shard, view) for each in (server, *backups) if each is not None]
            check_verdict_at_backups(task, message.verdict, tables)

    # -- what workers ask of it -------------------------------------------------------------------

    def make_client(self, worker: int, member: Member) -> Client:
        """Makes the connections of a worker."""
        who = Identity("", f"worker:{worker}", member.state.incarnation, member.state.epoch)
        return self._client(who, self.launcher.process(worker), lambda: member.view)

    def _client(
        self, who: Identity, process: OsProcess, view: Callable[[], View], patience: float = 1800.0
    ) -> Client:
        makers = self._makers

        def lanes(waiting: Callable[..., None]) -> Lanes:
            options = ClientOptions("", b"", who.index, who.incarnation, waiting=waiting)
            return makers.lanes(options, 1, view)

        protocol = makers.protocol(who.index, 1, patience_seconds=patience, rng=self.rng)
        levels = self.schedule.rule.synchronous
        return Client(who, self, process, protocol, lanes, view, levels=levels)

    def first_state(self, client: Client) -> ModelState:
        """Returns the values that a chief loads: a checkpoint's, its own, or first ones."""
        if client.life:
            if self.last is not None:
                return self.last
            if client.values:
                return self.model.state_of(client.protocol.step, client.values)
        return self._start if self._start is not None else self.model.first_state()

    def make_last_chief(self, worker: int) -> LastChief:
        """Makes what decides whether a worker saves the last step."""
        return self._makers.last_chief(worker)

    def crash_of(self, worker: int) -> Crash | None:
        """Returns the crash that is due at this worker's next push."""
        self._pushes[worker] += 1
        return self._crash_at(worker, self._pushes[worker])

    def last_crash_of(self, worker: int) -> Crash | None:
        """Returns the crash that is due when this worker saves the last step."""
        return self._crash_at(worker, 0)

    def _crash_at(self, worker: int, push: int) -> Crash | None:
        for crash in self._crashes:
            if (crash.worker, crash.push) == (worker, push):
                self._crashes.remove(crash)
                return crash
        return None

    def ended(self, worker: Worker, *, how: str, restart: float | None = None) -> None:
        """A worker is over."""
        self._note(f"{worker.client.name} {how}")
        self.launcher.ended(worker, how, restart)

    def copied(self, client: Client, copy: Copy) -> None:
        """A cut is complete: what it holds can be loaded anywhere."""
        parts: list[Snapshot] = [snapshot for snapshot, _ in copy]
        self.checker.check_cut(client.life, client.lanes.generation or 0, parts)
        made = client.life, parts[0].step
        if made >= self._last_made:  # else it was on its way for longer than a newer one
            self._last_made, self.last_at = made, self.loop.now
            self.last = final_checks.joined(client.layout, copy)

    def check_held(self, worker: tuple[int, int], spans: Sequence[Span]) -> None:
        """A worker leaves: what it holds unpushed must be what it thinks it holds."""
        found = final_checks.account_of(self, 0)
        if found is not None and worker in found.live:
            found.dealing.check_held(worker, spans)

    def seen(self, client: Client, life: int, shard: int, step: int, vectors: Vectors) -> None:
        """A worker has received values of a shard."""
        self._seen.add((life, shard))
        self.checker.see(life, client.layout, shard, step, vectors)

    def told_rows(self, life: int, bounds: Sequence[int], step: int, rows: bytes) -> None:
        """A server has told a worker the rows of all keys of a shard, which has these slots."""
        self.checker.see_rows(life, bounds, step, rows)

    def counts_known(self, life: int) -> tuple[int, ...]:
        """Returns by worker how many updates are acknowledged; nothing where none are counted."""
        return self.checker.counting.known(life, 8) if self.schedule.counts else ()

    def counted(
        self, life: int, slot: int, times: tuple[float, float], counts: Any, known: tuple[int, ...]
    ) -> None:
        """A worker has received a slot's values."""
        self.checker.counting.observe(life, slot, times, counts, known)

    def _note(self, what: str) -> None:
        if self.loop.note is not None:
            self.loop.note(f"{self.loop.now:8.4f} {what}")

    # -- views, and the end -----------------------------------------------------------------------

    def _viewed(self, before: View, state: State) -> None:
        """The coordinator has made a view."""
        view = self.coordinator.view
        self.checker.viewed(view)
        for entry in before.workers:
            task = state.tasks[f"worker:{entry.index}"]
            left = task.state == "left" and task.incarnation == entry.incarnation
            if entry not in view.workers and not left:
                self.launcher.lost(entry.index, entry.incarnation)
        if view.life > before.life and self.schedule.stop_at is not None:
            self._launch(self.loop.now, self._stop)  # what was asked is lost with the shards

    def _is_over(self) -> bool:
        launcher = self.launcher
        # A process without a member does not hear that the job is over, and may ask a server that
        # has gone: nobody waits for it then. A real one has a member.
        beside = self._coming if self.coordinator.state.over is None else 0
        return self.coordinator.done and not (launcher.members or launcher.coming or beside)

    def _waiting(self) -> str:
        waiting = [
            f"{worker.client.name} for shard {lane.index} ({lane.request.message})"
            for worker in self.launcher.workers.values()
            for lane in worker.client.lanes.waiting
            if lane.request is not None
        ]
        members = "; ".join(f"{t}: {t.state}" for t in self.coordinator.state.tasks.values())
        return "; ".join(waiting) or f"{self._coming} who are not workers, or {members}"


def _policy(schedule: Schedule) -> Policy:
    """Returns how long tasks may be silent: longer than a message and its answer take."""
    timeout = (1.0 if schedule.links else 0.3) + 1.2 * schedule.view_delay
    return Policy(
        workers=schedule.workers,
        servers=schedule.servers,
        heartbeat_interval=timeout / 3,
        heartbeat_timeout=timeout,
        reconnect_grace=0.3,
        end_grace=2.0,
        wait_for_restart=5.0,
        progress_timeout=0.0,
        settle=0.2,
        replicas=schedule.replicas,
        slots=8,
        survives_loss=schedule.survives,
        elastic=True,
    )


def _weather_of_members(schedule: Schedule) -> Weather:
    """Returns the weather between the tasks and the coordinator: it breaks no server's grace."""
    return Weather(
        breaks=schedule.weather.breaks / 5,
        calm_from=schedule.weather.calm_from,
        lag=schedule.view_delay,
    )

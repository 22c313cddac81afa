"""The membership under events in any order: what must hold whatever happens."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cluster.driver import Driver
from trireme.cluster.coordinator import resumed
from trireme.cluster.membership import Closed, Event, Paused, ProcessEnded, Received, Tick
from trireme.cluster.messages import (
    CaughtUp,
    CopyLost,
    Heartbeat,
    JobOver,
    JobOverHeard,
    Join,
    Leave,
    Left,
    LinkLost,
    Outcome,
    ReadyToSwitch,
    RequestRefused,
    Scale,
    Scaled,
    ViewChanged,
    WaitingFor,
)
from trireme.cluster.reconfiguration import is_needed
from trireme.cluster.state import Decision, Send, State, everybody_informed
from trireme.cluster.view import View, first_view

CHOICE = st.integers(0, 1_000)
OUTCOMES: st.SearchStrategy[Outcome] = st.sampled_from(
    ("finished", "finished", "interrupted", "interrupted", "failed")
)


class Membership(RuleBasedStateMachine):
    """Tasks that join, speak, vanish and return, and a model of what each connection was told."""

    def __init__(self) -> None:
        super().__init__()
        self.job = Driver()
        self.open: list[int] = []
        self.next_connection = 1
        self.told_view: dict[int, int] = {}
        self.told_over: dict[int, JobOver] = {}

    @initialize(
        workers=st.integers(1, 3),
        servers=st.integers(0, 3),
        replicas=st.integers(1, 2),
        wait_for_restart=st.sampled_from((0.0, 15.0)),
        rejoin_timeout=st.sampled_from((0.0, 25.0)),
        survives_loss=st.booleans(),
        elastic=st.booleans(),
        formed=st.sampled_from((True, True, False)),
    )
    def begin(
        self,
        workers: int,
        servers: int,
        replicas: int,
        wait_for_restart: float,
        rejoin_timeout: float,
        survives_loss: bool,
        elastic: bool,
        formed: bool,
    ) -> None:
        self.job = Driver(
            workers,
            servers,
            replicas=min(replicas, max(1, servers)),
            wait_for_restart=wait_for_restart,
            rejoin_timeout=rejoin_timeout,
            survives_loss=survives_loss,
            elastic=elastic,
            join_timeout=40.0,
            slots=16,
        )
        if formed:
            self.complete()

    # Events ------------------------------------------------------------------------------------

    @rule(which=CHOICE, claim=st.sampled_from((0, 0, 0, -1, 1, 2)))
    def join(self, which: int, claim: int) -> None:
        """Claims: 0 a new process; 1 the current incarnation; -1 an older one; 2 a newer one."""
        tasks = list(self.job.state.tasks.values())
        task = tasks[which % len(tasks)]
        incarnation = max(0, task.incarnation + claim - 1) if claim else 0
        connection = self.connect()
        join = Join(
            task.role,
            task.index,
            incarnation,
            "h",
            connection,
            f"tcp://h:{connection}",
            start=connection,
        )
        self.feed(Received(connection, join))

    @rule()
    def complete(self) -> None:
        """Lets all come that are not there, so that running jobs are tested enough."""
        for index, task in enumerate(list(self.job.state.tasks.values())):
            if task.state not in ("live", "left"):
                self.join(index, 0)

    @precondition(lambda self: self.open)
    @rule(which=CHOICE)
    def speak(self, which: int) -> None:
        self.feed(Received(self.pick(which), Heartbeat({"step": which}, self.job.now)))

    @precondition(lambda self: self.open)
    @rule(which=CHOICE)
    def hang_up(self, which: int) -> None:
        connection = self.pick(which)
        self.open.remove(connection)
        self.feed(Closed(connection, "the peer closed it"))

    @precondition(lambda self: self.open)
    @rule(which=CHOICE, outcome=OUTCOMES)
    def leave(self, which: int, outcome: Outcome) -> None:
        connection = self.pick(which)
        joined = self.job.state.holder(connection) is not None
        decision = self.feed(Received(connection, Leave(outcome, "so be it")))
        if joined:
            assert Send(connection, Left()) in decision.instructions

    @precondition(lambda self: self.open)
    @rule(which=CHOICE, message=st.sampled_from((JobOverHeard(), Left(), WaitingFor((), 0.0))))
    def say_something_else(self, which: int, message: JobOverHeard | Left | WaitingFor) -> None:
        self.feed(Received(self.pick(which), message))

    @rule(role=st.sampled_from(("ps", "worker")))
    def come_by_itself(self, role: str) -> None:
        """The next task joins, without having been asked for."""
        connection = self.connect()
        index = len(self.job.state.of(role))
        address = f"tcp://h:{connection}"
        join = Join(role, index, 0, "h", connection, address, start=connection)
        self.feed(Received(connection, join))

    @precondition(lambda self: self.open)
    @rule(which=CHOICE)
    def ask_to_join_again(self, which: int) -> None:
        """A process joins over a new connection, having heard no answer to its first question."""
        task = self.job.state.holder(self.pick(which))
        if task is not None:
            connection = self.connect()
            join = Join(task.role, task.index, 0, "h", 1, "tcp://h:1", start=task.start)
            self.feed(Received(connection, join))
            same = self.job.state.tasks[task.name].incarnation == task.incarnation
            assert same or task.state == "lost"

    @rule(servers=st.integers(0, 4) | st.none(), workers=st.integers(0, 4) | st.none())
    def scale(self, servers: int | None, workers: int | None) -> None:
        before = self.job.state
        decision = self.feed(Received(0, Scale(servers, workers), 1))
        answer = next(i.message for i in decision.instructions if i.connection == 0)
        if isinstance(answer, RequestRefused):
            assert decision.state.tasks == before.tasks
            return
        assert isinstance(answer, Scaled)
        assert servers is None or answer.servers == servers
        assert workers is None or answer.workers == workers

    @rule(which=CHOICE, right=st.sampled_from((True, True, False)))
    def end_a_process(self, which: int, right: bool) -> None:
        tasks = list(self.job.state.tasks.values())
        task = tasks[which % len(tasks)]
        pid = task.pid + (not right)
        self.feed(ProcessEnded(task.name, task.host, pid, "killed"))
        if right:
            assert not self.job.state.tasks[task.name].active

    @precondition(lambda self: self.job.state.view is not None)
    @rule(number=st.integers(0, 20), late=st.sampled_from((0, 0, 0, 1)))
    def catch_up(self, number: int, late: int) -> None:
        """A joining copy has caught up, and the primary says so; sometimes too late."""
        view = self.job.view
        filling = [(n, each) for n, shard in enumerate(view.shards) for each in shard.joining]
        if filling:
            shard, server = filling[number % len(filling)]
            entry, primary = view.server(server), self.connection_of(view.shards[shard].primary)
            if primary is not None and entry is not None:
                message = CaughtUp(view.generation - late, shard, server, entry.incarnation)
                self.feed(Received(primary, message))

    @precondition(lambda self: self.job.state.view is not None)
    @rule(number=st.integers(0, 20))
    def lose_a_copy(self, number: int) -> None:
        """A backup turns out to be of no use, and its primary says so."""
        view = self.job.view
        copies = [(n, each) for n, shard in enumerate(view.shards) for each in shard.backups]
        if copies:
            shard, server = copies[number % len(copies)]
            entry, primary = view.server(server), self.connection_of(view.shards[shard].primary)
            if primary is not None and entry is not None:
                message = CopyLost(view.generation, shard, server, entry.incarnation)
                self.feed(Received(primary, message))

    @precondition(lambda self: self.job.state.view is not None)
    @rule(number=st.integers(0, 20))
    def lose_a_link(self, number: int) -> None:
        """A primary makes no progress with another server, and says so."""
        view = self.job.view
        needed = [
            (n, other)
            for n, shard in enumerate(view.shards)
            for other in (*shard.backups, *shard.joining, view.shards[0].primary)
            if other != shard.primary
        ]
        if needed:
            shard, server = needed[number % len(needed)]
            entry, primary = view.server(server), self.connection_of(view.shards[shard].primary)
            if primary is not None and entry is not None:
                message = LinkLost(view.generation, shard, server, entry.incarnation)
                self.feed(Received(primary, message))

    @precondition(lambda self: self.job.state.reconfiguration is not None)
    @rule(number=st.integers(0, 20), late=st.sampled_from((0, 0, 0, 1)))
    def be_ready(self, number: int, late: int) -> None:
        """A shard has stopped at the cut; its primary says so, sometimes too late."""
        view, under_way = self.job.view, self.job.state.reconfiguration
        assert under_way is not None
        shard = number % len(view.shards)
        primary = self.connection_of(view.shards[shard].primary)
        if primary is not None:
            message = ReadyToSwitch(under_way.view - late, view.generation, shard)
            self.feed(Received(primary, message))

    @precondition(lambda self: self.job.state.view is not None)
    @rule()
    def come_to_rest(self) -> None:
        """All servers do what the views ask of them, and all is quiet meanwhile."""
        for _ in range(20):
            self.feed(Tick())
            for number in range(len(self.job.view.shards)):
                if self.job.state.reconfiguration is not None:
                    self.be_ready(number, 0)
            for _ in range(sum(len(shard.joining) for shard in self.job.view.shards)):
                self.catch_up(0, 0)

    def connection_of(self, server: int) -> int | None:
        return self.job.state.tasks[f"ps:{server}"].connection

    def connect(self) -> int:
        connection = self.next_connection
        self.next_connection += 1
        self.open.append(connection)
        return connection

    @rule(seconds=st.sampled_from((0.1, 1.0, 2.5, 6.0, 12.0)), alive=st.integers(0, 31))
    def wait(self, seconds: float, alive: int) -> None:
        self.job.now += seconds
        for bit, connection in enumerate(list(self.open)):
            if connection in self.open and alive >> (bit % 5) & 1:
                self.feed(Received(connection, Heartbeat({}, self.job.now)))
        self.feed(Tick())

    @rule(seconds=st.sampled_from((1.5, 100.0)))
    def stand_still(self, seconds: float) -> None:
        before = {name: task.state for name, task in self.job.state.tasks.items()}
        self.job.now += seconds
        self.feed(Paused(seconds))
        assert before == {name: task.state for name, task in self.job.state.tasks.items()}

    @rule(now=st.sampled_from((0.0, 1000.0)), back=st.integers(0, 31))
    def start_the_coordinator_anew(self, now: float, back: int) -> None:
        """It goes on from its journal, on another clock; some of its tasks come back at once."""
        before = self.job.state
        written = msgspec.msgpack.encode(before)
        self.job.now = now
        self.job.state = resumed(now, msgspec.msgpack.decode(written, type=State))
        self.open.clear()
        after = self.job.state
        assert (after.view, after.over, after.phase) == (before.view, before.over, before.phase)
        members = [task for task in before.tasks.values() if task.active]
        for bit, task in enumerate(members):
            if back >> (bit % 5) & 1:
                connection = self.connect()
                join = Join(
                    task.role,
                    task.index,
                    task.incarnation,
                    task.host,
                    task.pid,
                    task.address,
                    before.term,
                    task.start,
                )
                self.feed(Received(connection, join))
                assert self.job.state.tasks[task.name].incarnation == task.incarnation

    def pick(self, which: int) -> int:
        return self.open[which % len(self.open)]

    # What must hold after each -----------------------------------------------------------------

    def feed(self, event: Event) -> Decision:
        before = self.job.state
        decision = self.job.feed(event)
        assert decision.reason or not decision.instructions
        self.check_views(before, decision.state)
        self.check_incarnations(before, decision.state)
        if before.over is not None:
            assert frozen(decision.state) == frozen(before)
        self.carry_out(decision)
        return decision

    def check_views(self, before: State, after: State) -> None:
        if after.view == before.view:
            return
        assert after.view is not None
        number = before.view.number if before.view else 0
        assert after.view.number == max(number + 1, first_view(after.term))
        if before.view is not None:
            old, new = before.view, after.view
            assert msgspec.structs.replace(old, number=new.number) != new
            self.check_shards(before, old, new)
            seen = {worker.index: worker.incarnation for worker in old.workers}
            for worker in new.workers:
                assert worker.incarnation >= seen.get(worker.index, 1)

    def check_shards(self, before: State, old: View, new: View) -> None:
        """Only servers that held a shard, and still do, are its copies afterwards."""
        kept = {e.index for e in old.servers} & {e.index for e in new.servers if e in old.servers}
        if new.life != old.life:
            assert (new.life, new.generation) == (old.life + 1, old.generation + 1)
            assert any(not kept & set(shard.copies) for shard in old.shards)
            assert before.policy.survives_loss and not new.next_shards
            return
        if new.generation == old.generation:
            bounds = [(s.start, s.stop) for s in old.shards]
            assert bounds == [(s.start, s.stop) for s in new.shards]
        else:
            assert new.generation == old.generation + 1
            assert (new.shards, new.next_shards) == (old.next_shards, ())
        announces = bool(new.next_shards) and not old.next_shards
        if announces or new.generation != old.generation:
            assert old.servers == new.servers, "nobody may be lost in the same view"
        for shard in new.shards:
            for other in old.shards:
                if other.start < shard.stop and shard.start < other.stop:
                    filled = set(other.joining) if new.generation == old.generation else set()
                    assert set(shard.copies) <= kept & ({*other.copies} | filled)

    def check_incarnations(self, before: State, after: State) -> None:
        assert set(before.tasks) <= set(after.tasks)
        for name, task in after.tasks.items():
            earlier = before.tasks[name].incarnation if name in before.tasks else 0
            assert 0 <= task.incarnation - earlier <= 1

    def carry_out(self, decision: Decision) -> None:
        for instruction in decision.instructions:
            connection = instruction.connection
            if connection == 0:
                continue  # whoever asked to stop
            assert connection in self.open, f"{instruction} goes nowhere"
            if not isinstance(instruction, Send):
                self.open.remove(connection)
                continue
            message = instruction.message
            if isinstance(message, ViewChanged):
                assert message.view == decision.state.view
                assert message.view.number > self.told_view.get(connection, 0)
                self.told_view[connection] = message.view.number
            elif isinstance(message, JobOver):
                assert connection not in self.told_over, "told twice"
                self.told_over[connection] = message

    @invariant()
    def a_view_holds_each_task_once_in_order(self) -> None:
        view = self.job.state.view
        if view is None:
            assert self.job.state.phase != "running"
            return
        for indices in ([w.index for w in view.workers], [s.index for s in view.servers]):
            assert indices == sorted(set(indices))

    @invariant()
    def shards_are_all_slots_and_their_copies_lie_on_members(self) -> None:
        state = self.job.state
        view = state.view
        if view is None:
            return
        assert bool(view.shards) == bool(state.policy.servers)
        members = {server.index for server in view.servers}
        for shards in filter(None, (view.shards, view.next_shards)):
            bounds = [shard.start for shard in shards] + [16]
            assert bounds[0] == 0 and [shard.stop for shard in shards] == bounds[1:]
            for shard in shards:
                everyone = (*shard.copies, *shard.joining)
                assert len(set(everyone)) == len(everyone) and shard.start < shard.stop
                assert set(everyone) <= members
        assert bool(view.next_shards) == (state.reconfiguration is not None) or state.over

    @invariant()
    def who_is_dismissed_is_needed_by_nobody(self) -> None:
        state = self.job.state
        for task in state.tasks.values():
            assert not task.notified or task.dismissed
            told = task.notified and task.active and task.role == "ps" and state.over is None
            assert not told or not is_needed(state, task.index)
        for role in ("ps", "worker"):
            assert not state.of(role) or any(not task.dismissed for task in state.of(role))

    @invariant()
    def a_running_jobs_view_says_who_is_there(self) -> None:
        state = self.job.state
        if state.phase != "running" or state.view is None:
            return
        if state.policy.servers and not state.left_to_go_on("ps"):
            assert state.policy.wait_for_restart > 0  # it waits, with the view that it had
            return
        for role, entries in (("ps", state.view.servers), ("worker", state.view.workers)):
            there = {task.index: task.incarnation for task in state.of(role) if task.active}
            assert there == {entry.index: entry.incarnation for entry in entries}

    @invariant()
    def a_connection_belongs_to_one_task_and_is_open(self) -> None:
        held = [task.connection for task in self.job.state.tasks.values() if task.connection]
        assert len(held) == len(set(held))
        assert set(held) <= set(self.open)
        for task in self.job.state.tasks.values():
            assert task.state != "live" or task.connection is not None
            assert task.state not in ("disconnected", "lost") or task.connection is None

    @invariant()
    def everybody_connected_knows_what_is_to_be_known(self) -> None:
        state = self.job.state
        for task in state.tasks.values():
            if task.connection is None:
                continue
            if state.over is not None:
                assert self.told_over[task.connection] == state.over
            elif state.view is not None:
                assert self.told_view[task.connection] == state.view.number

    @invariant()
    def the_job_ends_when_nobody_is_left_to_go_on(self) -> None:
        state = self.job.state
        workers = state.of("worker")
        if state.phase == "running" and not any(worker.active for worker in workers):
            cut_off = any(worker.silent for worker in workers if worker.state == "lost")
            assert state.policy.wait_for_restart > 0 or (cut_off and state.policy.rejoin_timeout)
            assert any(worker.state == "lost" for worker in workers) or all(
                worker.dismissed or worker.state == "expected" for worker in workers
            )
        assert (state.over is not None) == (state.phase not in ("forming", "running"))
        assert state.over is None or state.over.outcome == state.phase
        assert state.over is None or state.over.outcome != "failed" or state.over.culprit

    def teardown(self) -> None:
        """Whatever happened: without a sign of life from anybody, the job comes to its end."""
        if not hasattr(self, "job"):
            return
        for _ in range(6):
            self.wait(30.0, 0)
        assert self.job.state.over is not None
        self.job.now += self.job.state.policy.end_grace
        assert everybody_informed(self.job.now, self.job.state)


def frozen(state: State) -> tuple[object, ...]:
    """What of a finished job must never change."""
    return (state.phase, state.reason, state.view, state.over, state.over_since)


TestMembership = Membership.TestCase
TestMembership.settings = settings(stateful_step_count=40, deadline=None)


def test_the_end_of_a_job_gives_its_last_copies_no_less_time() -> None:
    job = Membership()
    job.begin(1, 3, 2, 0.0, 0.0, False, False, True)
    job.wait(6.0, 23)
    job.start_the_coordinator_anew(0.0, 31)
    job.start_the_coordinator_anew(1000.0, 21)
    job.wait(12.0, 8)
    assert job.job.state.over is not None
    assert job.job.state.tasks["ps:2"].state == "live"
    job.scale(None, 1)
    job.stand_still(1.5)

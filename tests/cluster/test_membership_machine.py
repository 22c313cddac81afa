"""The membership under events in any order: what must hold whatever happens."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cluster.driver import Driver
from trireme.cluster.membership import Closed, Event, Paused, Received, Tick
from trireme.cluster.messages import (
    Heartbeat,
    JobOver,
    JobOverHeard,
    Join,
    Leave,
    Left,
    Outcome,
    ViewChanged,
    WaitingFor,
)
from trireme.cluster.state import Decision, Send, State, everybody_told

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
        servers=st.integers(0, 2),
        wait_for_restart=st.sampled_from((0.0, 15.0)),
        formed=st.sampled_from((True, True, False)),
    )
    def begin(self, workers: int, servers: int, wait_for_restart: float, formed: bool) -> None:
        self.job = Driver(
            workers,
            servers,
            wait_for_restart=wait_for_restart,
            join_timeout=40.0,
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
        connection = self.next_connection
        self.next_connection += 1
        self.open.append(connection)
        join = Join(task.role, task.index, incarnation, "h", connection, f"tcp://h:{connection}")
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
        self.feed(Received(self.pick(which), Heartbeat({"step": which})))

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

    @rule(seconds=st.sampled_from((0.1, 1.0, 2.5, 6.0, 12.0)), alive=st.integers(0, 31))
    def wait(self, seconds: float, alive: int) -> None:
        self.job.now += seconds
        for bit, connection in enumerate(list(self.open)):
            if connection in self.open and alive >> (bit % 5) & 1:
                self.feed(Received(connection, Heartbeat({})))
        self.feed(Tick())

    @rule(seconds=st.sampled_from((1.5, 100.0)))
    def stand_still(self, seconds: float) -> None:
        before = {name: task.state for name, task in self.job.state.tasks.items()}
        self.job.now += seconds
        self.feed(Paused(seconds))
        assert before == {name: task.state for name, task in self.job.state.tasks.items()}

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
        assert after.view.number == (before.view.number if before.view else 0) + 1
        if before.view is not None:
            old, new = before.view, after.view
            assert (old.servers, old.workers) != (new.servers, new.workers)
            seen = {worker.index: worker.incarnation for worker in old.workers}
            for worker in new.workers:
                assert worker.incarnation >= seen.get(worker.index, 1)

    def check_incarnations(self, before: State, after: State) -> None:
        assert list(before.tasks) == list(after.tasks)
        for name, task in after.tasks.items():
            assert 0 <= task.incarnation - before.tasks[name].incarnation <= 1

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
        indices = [worker.index for worker in view.workers]
        assert indices == sorted(set(indices))
        servers = [server.index for server in view.servers]
        assert servers == list(range(self.job.state.policy.servers))

    @invariant()
    def a_running_jobs_view_says_who_is_there(self) -> None:
        state = self.job.state
        if state.phase != "running" or state.view is None:
            return
        there = {task.index: task.incarnation for task in state.of("worker") if task.active}
        viewed = {worker.index: worker.incarnation for worker in state.view.workers}
        assert there == viewed
        assert all(server.active for server in state.of("ps"))

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
            assert state.policy.wait_for_restart > 0
            assert any(worker.state == "lost" for worker in workers)  # the others have finished
        assert (state.over is not None) == (state.phase not in ("forming", "running"))
        assert state.over is None or state.over.outcome == state.phase
        assert state.over is None or state.over.outcome != "failed" or state.over.culprit

    def teardown(self) -> None:
        """Whatever happened: without a sign of life from anybody, the job comes to its end."""
        if not hasattr(self, "job"):
            return
        for _ in range(4):
            self.wait(30.0, 0)
        assert self.job.state.over is not None
        self.job.now += self.job.state.policy.end_grace
        assert everybody_told(self.job.now, self.job.state)


def frozen(state: State) -> tuple[object, ...]:
    """What of a finished job must never change."""
    return (state.phase, state.reason, state.view, state.over, state.over_since)


TestMembership = Membership.TestCase
TestMembership.settings = settings(stateful_step_count=40, deadline=None)

"""Decisions about servers whose loss the job outlives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.launch.supervised import LIMITS, commands, end, notices, raised, supervise
from trireme.launch.exit_reason import ExitReason
from trireme.launch.supervision import Supervision
from trireme.launch.supervision_state import Kill, Phase, Start, StopJob, Terminate

SERVICES = ("ps:0", "ps:1")
REPLICATED = replace(LIMITS, outlives_servers=True)


def replicated(restarts: int = 0, **other: object) -> Supervision:
    limits = replace(REPLICATED, restarts=restarts, **other)
    supervision = supervise(services=SERVICES, limits=limits)
    supervision.membership_reported(0, True, {})
    return supervision


def finish(supervision: Supervision, now: float) -> None:
    for name in (*SERVICES, "worker:0", "worker:1"):
        end(supervision, now, name, 0)


@pytest.mark.parametrize(("status", "kind"), [(-9, "signal"), (1, "exception"), (-9, "gone")])
def test_a_server_is_started_again_alone(status: int, kind: str) -> None:
    supervision = replicated(restarts=2)
    for number in (1, 2):
        actions = end(supervision, number, "ps:1", status, raised(kind=kind, summary="why"))
        assert commands(actions) == [Start("ps:1")]
        assert f"started again ({number} of 2), to be filled by the other servers" in notices(
            actions
        )
        assert supervision.restarts_left("ps:1") == 2 - number
    assert supervision.restarts_left("ps:0") == supervision.restarts_left("worker:0") == 2
    actions = end(supervision, 3, "ps:1", status, raised(kind=kind, summary="why"))
    assert commands(actions) == []
    assert "the job goes on with the 1 server left" in notices(actions)
    assert supervision.phase is Phase.RUNNING
    finish(supervision, 4)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 0


@pytest.mark.parametrize(("restarts", "phase"), [(0, Phase.FAILING), (1, Phase.RUNNING)])
def test_a_server_that_dies_before_all_have_joined_is_missed(restarts: int, phase: Phase) -> None:
    limits = replace(REPLICATED, restarts=restarts)
    supervision = supervise(services=SERVICES, limits=limits)
    supervision.membership_reported(0, True, {}, formed=False)
    actions = end(supervision, 1, "ps:1", -9)
    assert supervision.phase is phase
    assert "goes on" not in notices(actions)


def test_corrupted_values_end_a_job_that_outlives_servers() -> None:
    supervision = replicated(restarts=2)
    assert commands(end(supervision, 1, "ps:1", 1, raised(kind="corrupted"))) == []
    assert supervision.phase is Phase.FAILING


def test_a_job_without_servers_left_fails_by_the_first_one_that_was_lost() -> None:
    supervision = replicated()
    end(supervision, 1, "ps:1", -9, raised(at=1, kind="signal", summary="killed by SIGKILL"))
    actions = end(supervision, 2, "ps:0", -9, raised(at=2, kind="signal", summary="killed"))
    assert "and no server is left" in notices(actions)
    assert supervision.phase is Phase.FAILING
    assert supervision.tick(4) == [Terminate("worker:0"), Terminate("worker:1")]
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "ps:1"


def test_the_loss_of_all_copies_is_the_coordinators_word() -> None:
    """Its tasks end because the job has failed. The report names the server that was lost first."""
    supervision = replicated()
    end(supervision, 1, "ps:1", -9, raised(at=1, kind="signal", summary="killed by SIGKILL"))
    for name in ("worker:0", "ps:0", "worker:1"):
        over = raised(at=2, kind="victim", summary="the job is over, failed")
        assert commands(end(supervision, 2, name, 1, over)) == []
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 1
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "ps:1"


def test_a_server_that_was_given_up_has_a_moment_to_come_back() -> None:
    supervision = replicated(restarts=1)
    silent = ExitReason(kind="hung", summary="given up and killed: it sent nothing for 10 s")
    assert supervision.membership_reported(10, True, {"ps:1": silent}) == []
    assert supervision.tick(11.9) == []
    assert supervision.tick(12) == [Kill("ps:1")]
    actions = end(supervision, 12, "ps:1", -9)
    assert commands(actions) == [Start("ps:1")]
    assert "ps:1 was given up and killed: it sent nothing for 10 s" in notices(actions)


def test_a_server_that_was_given_up_and_fails_by_that_is_started_again() -> None:
    supervision = replicated(restarts=1)
    silent = ExitReason(kind="hung", summary="given up and killed: it sent nothing for 10 s")
    supervision.membership_reported(10, True, {"ps:1": silent})
    over = raised(kind="victim", summary="the job is over, failed: superseded")
    assert commands(end(supervision, 11, "ps:1", 1, over)) == [Start("ps:1")]


def test_bad_usage_of_a_server_ends_the_job() -> None:
    supervision = replicated(restarts=5)
    assert commands(end(supervision, 1, "ps:1", 2, raised(kind="usage"))) == []
    assert supervision.phase is Phase.FAILING


def test_a_server_that_dies_while_the_workers_save_is_not_started_again() -> None:
    supervision = replicated(restarts=5)
    supervision.interrupt(1)
    actions = end(supervision, 2, "ps:1", -9)
    assert commands(actions) == []
    assert "the job goes on with the 1 server left" in notices(actions)
    for name in ("worker:0", "worker:1"):
        end(supervision, 3, name, 130)
    for name in ("ps:0",):
        end(supervision, 4, name, 0)
    assert supervision.verdict.status == 130


def test_stop_while_a_server_is_started_again_ends_all() -> None:
    supervision = replicated(restarts=5)
    end(supervision, 1, "ps:1", -9)  # its new process has not joined yet
    told = [Terminate("worker:0"), Terminate("worker:1")]
    assert commands(supervision.interrupt(2)) == [StopJob(), *told]
    for name in ("worker:0", "worker:1"):
        end(supervision, 3, name, 130)
    assert supervision.phase is Phase.ENDING
    assert commands(supervision.tick(18)) == [Terminate(name) for name in SERVICES]
    for name in SERVICES:
        end(supervision, 18, name, -15)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 130


def test_everything_may_be_lost_at_once() -> None:
    supervision = replicated(restarts=1)
    names = (*SERVICES, "worker:0", "worker:1")
    for name in names:
        assert commands(end(supervision, 1, name, -9)) == [Start(name)]
    assert supervision.phase is Phase.RUNNING


def test_a_server_is_started_again_while_sharded_workers_are() -> None:
    supervision = replicated(restarts=2, together=True)
    end(supervision, 1, "worker:0", -9)
    assert supervision.phase is Phase.RESTARTING
    assert commands(end(supervision, 1, "ps:1", -9)) == [Start("ps:1")]
    actions = end(supervision, 2, "worker:1", 1, raised(kind="victim"))
    assert commands(actions) == [Start("worker:0"), Start("worker:1")]
    assert supervision.phase is Phase.RUNNING


# A job that grows and shrinks ----------------------------------------------------------------


def test_tasks_that_the_job_has_room_for_are_started_once() -> None:
    supervision = replicated()
    wanted = ("ps:0", "ps:1", "ps:2", "worker:0", "worker:1")
    actions = supervision.resized(wanted, (), asked=True)
    assert commands(actions) == [Start("ps:2")]
    assert "ps:2 is started: the job was made larger" in notices(actions)
    supervision.started("ps:2")
    assert supervision.resized(wanted, (), asked=False) == []


def test_a_dismissed_task_may_end_as_it_likes() -> None:
    supervision = replicated(restarts=1)
    supervision.resized(("ps:0", "worker:0"), ("ps:1", "worker:1"), asked=True)
    assert "worker:1 has left: the job was made smaller" in notices(
        end(supervision, 1, "worker:1", 0)
    )
    actions = end(supervision, 2, "ps:1", 1, raised(summary="OSError: gone"))
    assert commands(actions) == []
    assert "ps:1 left, and OSError: gone" in notices(actions)
    assert supervision.phase is Phase.RUNNING
    end(supervision, 3, "worker:0", -9)  # and is started again: nothing was achieved yet
    end(supervision, 4, "worker:0", -9)
    assert supervision.verdict.failed


def test_a_worker_that_left_before_that_was_known_has_not_finished_the_job() -> None:
    supervision = replicated()
    end(supervision, 1, "worker:1", 0)
    supervision.resized(("ps:0", "ps:1", "worker:0"), ("worker:1",), asked=True)
    end(supervision, 2, "worker:0", -9)
    assert supervision.verdict.failed


def test_a_task_that_was_dismissed_is_started_when_the_job_grows_again() -> None:
    supervision = replicated()
    supervision.resized(("ps:0", "worker:0", "worker:1"), ("ps:1",), asked=True)
    everybody = ("ps:0", "ps:1", "worker:0", "worker:1")
    assert supervision.resized(everybody, (), asked=True) == []  # it has not ended: it stays
    supervision.resized(("ps:0", "worker:0", "worker:1"), ("ps:1",), asked=True)
    end(supervision, 1, "ps:1", 0)
    assert commands(supervision.resized(everybody, (), asked=True)) == [Start("ps:1")]


def test_a_task_that_has_left_and_not_ended_is_started_when_it_has() -> None:
    supervision = replicated()
    left = ("ps:0", "ps:1", "worker:0")
    supervision.resized(left, ("worker:1",), asked=True)
    ended = ExitReason(kind="hung", summary="given up and killed: its process has ended")
    for now in (1, 2):  # the coordinator's reports are repeated
        supervision.membership_reported(now, True, {"worker:1": ended})
        assert supervision.resized((*left, "worker:1"), (), asked=now == 1) == []
    assert commands(end(supervision, 3, "worker:1", 0)) == []
    again = supervision.resized((*left, "worker:1"), (), asked=False)
    assert commands(again) == [Start("worker:1")]
    supervision.started("worker:1")
    end(supervision, 4, "worker:1", 0)
    assert supervision.resized((*left, "worker:1"), (), asked=False) == []
    end(supervision, 5, "worker:0", -9)
    assert not supervision.verdict.failed


def test_who_asks_for_the_number_again_gets_what_was_lost() -> None:
    supervision = replicated(restarts=0)
    everybody = ("ps:0", "ps:1", "worker:0", "worker:1")
    end(supervision, 1, "ps:1", -9)
    end(supervision, 1, "worker:1", -9)
    assert supervision.resized(everybody, (), asked=False) == []
    actions = supervision.resized(everybody, (), asked=True)
    assert commands(actions) == [Start("ps:1"), Start("worker:1")]


def test_a_worker_that_has_finished_is_not_started_again() -> None:
    supervision = replicated()
    end(supervision, 1, "worker:1", 0)
    everybody = ("ps:0", "ps:1", "worker:0", "worker:1")
    assert supervision.resized(everybody, (), asked=True) == []


@settings(max_examples=100, stateful_step_count=20, deadline=None)
class AnyOrder(RuleBasedStateMachine):
    """Tasks end, in any order and for any reason, while the job is resized and stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.supervision = replicated(restarts=2)
        self.alive = {*SERVICES, "worker:0", "worker:1"}
        self.starts = dict.fromkeys(self.alive, 0)

    def act(self, actions, *, added: bool = False) -> None:
        for action in commands(actions):
            if isinstance(action, Start):
                assert action.name not in self.alive
                self.alive.add(action.name)
                # What the job is made larger by begins to count from 0.
                self.starts[action.name] = 0 if added else self.starts[action.name] + 1
                self.supervision.started(action.name)
        if self.supervision.phase is Phase.STARTING:  # the whole job, as the coordinator is gone
            assert not self.alive
            self.alive = {*SERVICES, "worker:0", "worker:1"}
            self.supervision.keep_only(self.alive)
            for name in sorted(self.alive):
                self.starts[name] = self.starts.get(name, 0)
                self.supervision.started(name)

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(),
        how=st.sampled_from([(0, "exit"), (-9, "signal"), (1, "exception"), (1, "victim")]),
    )
    def a_task_ends(self, data, how) -> None:
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.discard(name)
        self.now += 0.1
        self.act(end(self.supervision, self.now, name, how[0], raised(kind=how[1])))

    @rule(servers=st.integers(1, 4), workers=st.integers(1, 4), asked=st.booleans())
    def it_is_resized(self, servers: int, workers: int, asked: bool) -> None:
        names = {*(f"ps:{i}" for i in range(servers)), *(f"worker:{i}" for i in range(workers))}
        left = {name for name in self.starts if name not in names}
        actions = self.supervision.resized(sorted(names), sorted(left), asked=asked)
        self.act(actions, added=True)

    @rule()
    def it_is_stopped(self) -> None:
        self.now += 1.0
        self.act(self.supervision.interrupt(self.now))

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for action in commands(self.supervision.tick(self.now)):
            assert isinstance(action, Kill | Terminate)
            assert action.name in self.alive

    @invariant()
    def nothing_is_started_too_often(self) -> None:
        assert all(starts <= 2 for starts in self.starts.values())

    def teardown(self) -> None:
        while self.alive:
            name = self.alive.pop()
            self.now += 1.0
            self.act(end(self.supervision, self.now, name, 0))
        assert self.supervision.phase is Phase.DONE


TestAnyOrder = AnyOrder.TestCase

from __future__ import annotations

import msgspec
import pytest

from tests.cluster.driver import Driver
from trireme.cluster.membership import Closed, Paused, ProcessEnded, Tick, step
from trireme.cluster.messages import (
    Heartbeat,
    HeartbeatHeard,
    JobOver,
    JobOverHeard,
    Join,
    Joined,
    LastStepSaved,
    Left,
    Outcome,
    RequestRefused,
    ViewChanged,
    WaitingFor,
)
from trireme.cluster.state import Policy, cluster_status, everybody_informed
from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry, first_view
from trireme.launch.config.task_config import TaskConfig

JOINED = Joined(1, 1.0, 10.0)
JOINED_AS_SECOND = Joined(2, 1.0, 10.0)


def over(driver: Driver) -> JobOver:
    assert driver.state.over is not None
    return driver.state.over


class TestForming:
    def test_the_first_view_comes_with_the_last_task(self) -> None:
        job = Driver(workers=2, servers=1)
        b = job.join("worker:1")
        assert job.sent == [(b, JOINED)]
        s = job.join("ps:0")
        assert job.sent == [(s, JOINED)]
        assert job.state.phase == "forming" and job.state.view is None
        a = job.join("worker:0")
        view = View(
            1,
            (ServerEntry(0, 1, "tcp://h:0"),),
            (WorkerEntry(0, 1), WorkerEntry(1, 1)),
            (ShardEntry(0, 256, 0),),
        )
        assert job.sent[0] == (a, JOINED)
        assert sorted(job.sent[1:], key=lambda each: each[0]) == [
            (c, ViewChanged(view)) for c in sorted((a, b, s))
        ]
        assert job.state.phase == "running"
        assert view.chief == 0

    def test_those_who_wait_are_told_for_whom(self) -> None:
        job = Driver(workers=2, servers=1, join_timeout=60.0)
        a = job.join("worker:0")
        job.wait(4.0, a)
        assert job.sent == []
        job.wait(1.0, a)
        assert job.to(a) == [WaitingFor(("ps:0", "worker:1"), 55.0)]
        job.wait(4.0, a)
        assert job.sent == []
        job.wait(1.0, a)
        assert job.to(a) == [WaitingFor(("ps:0", "worker:1"), 50.0)]

    def test_the_job_fails_and_names_who_never_came(self) -> None:
        job = Driver(workers=2, servers=1, join_timeout=30.0)
        a = job.join("worker:0")
        job.wait(29.0, a)
        assert job.state.over is None
        job.wait(1.0, a)
        assert over(job).outcome == "failed"
        assert over(job).culprit == "ps:0"
        assert "ps:0 (it has not come yet), worker:1 (it has not come yet)" in over(job).reason
        assert "30 s" in over(job).reason
        assert job.to(a) == [over(job)]

    def test_a_task_lost_while_forming_is_missing_again(self) -> None:
        job = Driver(workers=2, servers=1)
        a, s = job.join("worker:0"), job.join("ps:0")
        job.hang_up(s)
        job.wait(3.0, a)
        assert job.state.over is None
        assert job.state.tasks["ps:0"].state == "lost"
        job.join("worker:1")
        assert job.state.view is None
        job.join("ps:0")
        assert job.view.servers == (ServerEntry(0, 2, "tcp://h:0"),)

    def test_a_task_cut_off_for_a_moment_holds_up_the_first_view(self) -> None:
        job = Driver(workers=2, servers=0)
        a = job.join("worker:0")
        job.hang_up(a)
        job.join("worker:1")
        assert job.state.phase == "forming"
        job.join("worker:0", incarnation=1)
        assert job.workers == {0: 1, 1: 1}

    def test_an_interrupted_worker_ends_it_when_no_other_has_come(self) -> None:
        job = Driver(workers=2, servers=1)
        a, s = job.join("worker:0"), job.join("ps:0")
        job.leave(a, "interrupted", "SIGINT")
        assert over(job).outcome == "interrupted"
        assert job.to(s) == [over(job)]


class TestTerm:
    def test_views_of_a_later_term_have_higher_numbers(self) -> None:
        first, second = Driver(workers=2), Driver(workers=2)
        second.state = msgspec.structs.replace(second.state, term=2)
        for job in (first, second):
            job.join_all()
            job.leave(job.join("worker:1", pid=8, incarnation=1), "finished")
        assert first.view.number == 2
        assert second.view.number == first_view(2) + 1
        assert first.view.number < first_view(2) <= second.view.number < first_view(3)

    def test_who_has_joined_a_later_term_is_not_taken_in(self) -> None:
        job = Driver()
        [refused] = job.to(job.join("worker:0", incarnation=1, term=2))
        assert isinstance(refused, RequestRefused) and refused.code == "deposed"
        assert "worker:0 has joined term 2 of the coordinator" in refused.reason
        assert job.state.tasks["worker:0"].state == "expected"

    def test_who_joins_is_told_epoch_and_term(self) -> None:
        job = Driver()
        job.state = msgspec.structs.replace(job.state, epoch="abc", term=3)
        assert job.to(job.join("worker:0")) == [Joined(1, 1.0, 10.0, "abc", 3)]


class TestJoining:
    @pytest.mark.parametrize("name", ["worker:2", "ps:1", "coordinator:0"])
    def test_a_task_outside_the_cluster_is_refused(self, name: str) -> None:
        job = Driver(workers=2, servers=1)
        c = job.join(name)
        [refused] = job.to(c)
        assert isinstance(refused, RequestRefused) and refused.code == "outside"
        assert name in refused.reason
        assert name not in job.state.tasks

    def test_a_task_that_another_holds_is_refused(self) -> None:
        job = Driver()
        a = job.join_all()["worker:0"]
        job.now += 9
        job.say(a, Heartbeat({}))
        job.now += 0.9
        before = job.state
        [refused] = job.to(job.join("worker:0", pid=8))
        assert isinstance(refused, RequestRefused) and refused.code == "claimed"
        assert "pid 7 on h" in refused.reason
        assert job.state.tasks == before.tasks and job.view is before.view

    def test_a_new_process_takes_over_from_one_that_is_cut_off(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        c = job.join("worker:1")
        assert job.workers == {0: 1, 1: 2}
        assert job.view.number == 2  # one view, not one without it and one with
        assert job.to(c) == [JOINED_AS_SECOND, ViewChanged(job.view)]
        assert job.to(tasks["worker:0"]) == [ViewChanged(job.view)]

    def test_an_old_incarnation_is_refused_once_another_has_its_place(self) -> None:
        job = Driver()
        job.hang_up(job.join_all()["worker:1"])
        job.join("worker:1")
        [refused] = job.to(job.join("worker:1", incarnation=1))
        assert isinstance(refused, RequestRefused) and refused.code == "superseded"
        assert job.workers == {0: 1, 1: 2}

    def test_an_incarnation_that_was_never_given_is_refused(self) -> None:
        job = Driver()
        [refused] = job.to(job.join("worker:1", incarnation=1))
        assert isinstance(refused, RequestRefused) and refused.code == "unknown"

    def test_one_connection_holds_one_task(self) -> None:
        job = Driver()
        a = job.join("worker:0")
        job.say(a, Join("worker", 1, 0, "h", 7, ""))
        [refused] = job.to(a)
        assert isinstance(refused, RequestRefused) and refused.code == "claimed"
        assert job.state.tasks["worker:1"].state == "expected"

    def test_a_worker_that_was_lost_comes_back_into_a_new_view(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        job.wait(2.0, tasks["worker:0"], tasks["ps:0"])
        assert job.workers == {0: 1}
        c = job.join("worker:1")
        assert job.workers == {0: 1, 1: 2}
        assert job.view.number == 3
        assert job.to(c)[0] == JOINED_AS_SECOND

    def test_a_worker_that_was_given_up_but_lives_becomes_a_new_incarnation(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.wait(10.0, tasks["worker:0"], tasks["ps:0"])
        assert job.workers == {0: 1}
        c = job.join("worker:1", incarnation=1)
        assert job.to(c)[0] == JOINED_AS_SECOND
        assert job.workers == {0: 1, 1: 2}


class TestReconnecting:
    def test_a_task_goes_on_and_is_told_what_it_missed(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        assert job.view.number == 1 and job.sent == []
        job.now += 1.9
        c = job.join("worker:1", incarnation=1)
        assert job.sent == [(c, JOINED), (c, ViewChanged(job.view))]
        assert job.view.number == 1
        job.wait(20.0, c, tasks["worker:0"], tasks["ps:0"])
        assert job.view.number == 1

    def test_a_new_connection_replaces_one_that_only_seems_alive(self) -> None:
        job = Driver()
        tasks = job.join_all()
        c = job.join("worker:1", incarnation=1)
        assert job.closed == [tasks["worker:1"]]
        assert job.to(c)[0] == JOINED
        job.hang_up(tasks["worker:1"])
        assert job.state.tasks["worker:1"].state == "live"

    def test_a_server_goes_on_too(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["ps:0"])
        job.now += 1.0
        job.join("ps:0", incarnation=1)
        assert job.state.over is None and job.view.number == 1


class TestLosing:
    def test_a_worker_whose_connection_closed_is_lost_after_the_grace(self) -> None:
        job = Driver(reconnect_grace=2.0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:0"])
        job.now += 1.99
        job.feed(Tick())
        assert job.workers == {0: 1, 1: 1}
        job.now += 0.01
        job.feed(Tick())
        assert job.workers == {1: 1}
        assert job.view.chief == 1
        assert sorted(job.views_sent()) == sorted([(tasks["ps:0"], 2), (tasks["worker:1"], 2)])
        assert "worker:0 (pid 7 on h) was lost" in job.reason
        assert "the peer closed it" in job.reason

    def test_a_silent_worker_is_lost_and_its_connection_closed(self) -> None:
        job = Driver(heartbeat_timeout=10.0)
        tasks = job.join_all()
        job.wait(9.0, tasks["ps:0"], tasks["worker:0"])
        assert job.workers == {0: 1, 1: 1}
        job.wait(1.0, tasks["ps:0"], tasks["worker:0"])
        assert job.workers == {0: 1}
        assert job.closed == [tasks["worker:1"]]
        assert "sent nothing for 10.0 s" in job.reason

    def test_last_words_of_a_lost_worker_are_not_heard(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.wait(10.0, tasks["ps:0"], tasks["worker:0"])
        job.say(tasks["worker:1"], Heartbeat({}))
        assert job.closed == [tasks["worker:1"]] and job.sent == []
        assert job.state.tasks["worker:1"].state == "lost"

    def test_a_lost_server_fails_the_job(self) -> None:
        job = Driver(servers=2)
        tasks = job.join_all()
        job.hang_up(tasks["ps:1"])
        job.wait(2.0, *(c for name, c in tasks.items() if name != "ps:1"))
        assert over(job).outcome == "failed" and over(job).culprit == "ps:1"
        assert "ps:1 (pid 7 on h) was lost" in over(job).reason
        assert {c for c, m in job.sent if m == over(job)} == set(tasks.values()) - {tasks["ps:1"]}
        assert job.views_sent() == []

    def test_a_server_that_starts_anew_has_lost_its_parameters(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["ps:0"])
        c = job.join("ps:0", pid=8)
        assert over(job).outcome == "failed" and over(job).culprit == "ps:0"
        assert "pid 8" in over(job).reason
        assert job.to(c).count(over(job)) == 1
        assert job.to(tasks["worker:0"]) == [over(job)]

    def test_when_all_workers_are_lost_the_first_is_the_culprit(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        job.now += 0.5
        job.feed(Tick())
        job.hang_up(tasks["worker:0"])
        job.wait(3.0, tasks["ps:0"])
        assert over(job).outcome == "failed" and over(job).culprit == "worker:1"

    def test_all_workers_lost_may_come_back_where_somebody_restarts_them(self) -> None:
        job = Driver(workers=1, wait_for_restart=20.0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:0"])
        job.wait(15.0, tasks["ps:0"])
        assert job.state.over is None and job.workers == {}
        assert job.view.chief is None
        job.join("worker:0")
        assert job.workers == {0: 2}

    def test_but_not_for_ever(self) -> None:
        job = Driver(workers=1, wait_for_restart=20.0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:0"])
        job.wait(2.0 + 19.0, tasks["ps:0"])
        assert job.state.over is None
        job.wait(1.0, tasks["ps:0"])
        assert over(job).outcome == "failed" and over(job).culprit == "worker:0"

    def test_workers_that_are_all_cut_off_may_come_back_by_themselves(self) -> None:
        job = Driver(rejoin_timeout=600.0)
        tasks = job.join_all()
        job.wait(75.0, tasks["ps:0"])
        assert job.workers == {} and job.state.over is None
        again = job.join("worker:1", incarnation=1)
        assert job.workers == {1: 2} and job.state.over is None
        job.wait(600.0, tasks["ps:0"], again)
        assert job.state.over is None, "worker:1 goes on, whatever became of the other"

    def test_but_only_as_long_as_a_worker_tries(self) -> None:
        job = Driver(workers=1, rejoin_timeout=600.0)
        tasks = job.join_all()
        job.wait(609.0, tasks["ps:0"])
        assert job.state.over is None
        job.wait(2.0, tasks["ps:0"])
        assert over(job).outcome == "failed" and over(job).culprit == "worker:0"

    def test_so_may_a_worker_whose_connection_the_system_gave_up(self) -> None:
        job = Driver(workers=1, rejoin_timeout=600.0)
        tasks = job.join_all()
        job.feed(Closed(tasks["worker:0"], "nothing was acknowledged", silent=True))
        job.wait(75.0, tasks["ps:0"])
        assert job.workers == {} and job.state.over is None
        job.join("worker:0", incarnation=1)
        assert job.workers == {0: 2}

    def test_a_worker_whose_process_has_ended_does_not(self) -> None:
        job = Driver(workers=1, rejoin_timeout=600.0)
        tasks = job.join_all()
        job.wait(15.0, tasks["ps:0"])
        assert job.state.over is None
        job.feed(ProcessEnded("worker:0", "h", 7, "killed by SIGKILL"))
        assert over(job).outcome == "failed" and over(job).culprit == "worker:0"

    def test_nobody_is_given_up_because_the_coordinator_stood_still(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        job.now += 60.0
        job.feed(Paused(60.0))
        assert job.workers == {0: 1, 1: 1} and job.state.over is None
        job.wait(2.0, tasks["ps:0"], tasks["worker:0"])
        assert job.workers == {0: 1}
        job.wait(10.0, tasks["worker:0"])
        assert over(job).culprit == "ps:0"  # what is silent on is still found


class TestLeaving:
    def test_the_others_go_on(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.leave(tasks["worker:0"], "finished")
        assert job.to(tasks["worker:0"])[0] == Left()
        assert job.workers == {1: 1} and job.view.chief == 1
        job.hang_up(tasks["worker:0"])
        job.wait(20.0, tasks["ps:0"], tasks["worker:1"])
        assert job.state.tasks["worker:0"].state == "left" and job.state.over is None

    def test_when_all_have_finished_so_has_the_job(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.leave(tasks["worker:0"], "finished")
        job.leave(tasks["worker:1"], "finished")
        assert over(job) == JobOver("finished", "", "every worker has finished")
        assert job.to(tasks["ps:0"]) == [over(job)]
        assert job.to(tasks["worker:1"]) == [Left(), over(job)]
        assert job.view.number == 3, "the last step is saved, and one worker has left"

    def test_one_interrupted_makes_the_job_interrupted(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.leave(tasks["worker:1"], "interrupted", "SIGTERM")
        assert job.state.over is None
        job.leave(tasks["worker:0"], "finished")
        assert over(job).outcome == "interrupted" and over(job).culprit == "worker:1"
        assert "SIGTERM" in over(job).reason

    def test_a_worker_lost_on_the_way_does_not_fail_those_who_finish(self) -> None:
        job = Driver(wait_for_restart=60.0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:0"])
        job.wait(3.0, tasks["ps:0"], tasks["worker:1"])
        job.leave(tasks["worker:1"], "finished")
        assert over(job).outcome == "finished"
        assert "lost on the way: worker:0" in over(job).reason

    def test_a_chief_lost_when_nobody_can_take_over_fails_the_job(self) -> None:
        job = Driver(heartbeat_timeout=10.0, rejoin_timeout=0.0)
        tasks = job.join_all()
        job.now += 1
        job.leave(tasks["worker:1"], "finished")
        job.wait(10, tasks["ps:0"])
        assert over(job).outcome == "failed" and over(job).culprit == "worker:0"
        assert "had not reported that it had saved the last step" in over(job).reason

    def test_its_new_process_is_waited_for_where_there_will_be_one(self) -> None:
        job = Driver(heartbeat_timeout=10.0, wait_for_restart=60.0)
        tasks = job.join_all()
        job.now += 1
        job.leave(tasks["worker:1"], "finished")
        job.wait(20, tasks["ps:0"])
        assert job.state.over is None
        again = job.join("worker:0")
        job.leave(again, "finished")
        assert over(job).outcome == "finished"

    def test_who_had_ended_before_it_heard_of_the_loss_has_not_taken_over(self) -> None:
        job = Driver(wait_for_restart=60.0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:0"])
        job.wait(3.0, tasks["ps:0"], tasks["worker:1"])
        assert job.view.chief == 1
        job.leave(tasks["worker:1"], "finished", chief=False)
        assert job.state.over is None
        job.leave(job.join("worker:0"), "finished")
        assert over(job).outcome == "finished"

    def test_but_not_for_ever_either(self) -> None:
        job = Driver(heartbeat_timeout=10.0, wait_for_restart=60.0, rejoin_timeout=60.0)
        tasks = job.join_all()
        job.now += 1
        job.leave(tasks["worker:1"], "finished")
        job.wait(75, tasks["ps:0"])
        assert over(job).culprit == "worker:0"

    def test_who_took_over_from_a_lost_chief_has_saved(self) -> None:
        job = Driver(workers=3, heartbeat_timeout=10.0)
        tasks = job.join_all()
        job.leave(tasks["worker:2"], "finished")
        job.wait(10, tasks["ps:0"], tasks["worker:1"])
        job.leave(tasks["worker:1"], "finished")
        assert over(job).outcome == "finished"

    def test_views_say_whether_the_chief_has_saved_the_last_step(self) -> None:
        job = Driver(workers=4)
        tasks = job.join_all()
        assert job.view.saved is None
        job.hang_up(tasks["worker:0"])
        job.wait(3.0, *tasks.values())
        job.leave(tasks["worker:2"], "finished")
        assert job.view.chief == 1 and job.view.saved is None
        job.say(tasks["worker:1"], LastStepSaved(7))
        assert job.view.chief == 1 and job.view.saved == 7
        job.leave(tasks["worker:1"], "finished", chief=False)
        assert job.view.chief == 3 and job.view.saved == 7

    def test_a_chief_that_has_saved_and_whose_program_is_lost_fails_the_job(self) -> None:
        """No worker takes over from it, and its program has not ended."""
        job = Driver(heartbeat_timeout=10.0)
        tasks = job.join_all()
        job.say(tasks["worker:0"], LastStepSaved(7))
        job.hang_up(tasks["worker:0"])
        job.wait(10, tasks["ps:0"], tasks["worker:1"])
        assert job.view.chief == 1 and job.view.saved == 7
        job.leave(tasks["worker:1"], "finished", chief=False)
        assert over(job).outcome == "failed" and over(job).culprit == "worker:0"
        assert "its program had not ended, though the last step is saved" in over(job).reason

    def test_only_a_worker_saves(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.say(tasks["ps:0"], LastStepSaved(7))
        assert job.view.saved is None

    def test_a_failure_ends_the_job_once(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.leave(tasks["worker:1"], "failed", "ValueError: x")
        first = JobOver("failed", "worker:1", "worker:1 (pid 7 on h) failed: ValueError: x")
        assert over(job) == first
        assert {c for c, m in job.sent if m == first} == set(tasks.values())
        job.leave(tasks["worker:0"], "failed", "KeyError: y")
        assert job.sent == [(tasks["worker:0"], Left())]
        assert over(job) == first

    def test_a_worker_that_fails_because_a_server_went_is_not_the_culprit(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["ps:0"])
        job.now += 0.25
        job.leave(tasks["worker:1"], "failed", "PeerClosed: ps:0")
        assert over(job).culprit == "ps:0"
        assert "worker:1" in over(job).reason and "PeerClosed: ps:0" in over(job).reason

    def test_a_server_may_not_go_before_the_workers(self) -> None:
        for outcome, expected in (("finished", "failed"), ("interrupted", "interrupted")):
            job = Driver()
            job.leave(job.join_all()["ps:0"], outcome)  # type: ignore[arg-type]
            assert over(job).outcome == expected and over(job).culprit == "ps:0"

    def test_leaving_again_is_only_acknowledged(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.leave(tasks["worker:0"], "finished")
        job.hang_up(tasks["worker:0"])
        c = job.join("worker:0", incarnation=1)
        assert job.state.tasks["worker:0"].state == "left"
        job.leave(c, "failed", "late")
        assert job.sent == [(c, Left())]
        assert job.state.over is None and job.workers == {1: 1}

    def test_a_worker_that_left_may_be_started_again(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.leave(tasks["worker:0"], "finished")
        job.join("worker:0")
        assert job.workers == {0: 2, 1: 1}
        assert job.closed == [tasks["worker:0"]]


class TestTheEnd:
    def finished(self) -> tuple[Driver, dict[str, int]]:
        job = Driver(end_grace=5.0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        job.leave(tasks["worker:0"], "failed", "boom")
        return job, tasks

    def test_everybody_is_told_before_the_coordinator_goes(self) -> None:
        job, tasks = self.finished()
        for name in ("worker:0", "ps:0"):
            assert not everybody_informed(job.now, job.state)
            job.say(tasks[name], JobOverHeard())
            assert job.closed == [tasks[name]]
        assert not everybody_informed(job.now, job.state)
        c = job.join("worker:1", incarnation=1)
        assert job.to(c) == [JOINED, over(job)]
        job.say(c, JobOverHeard())
        assert everybody_informed(job.now, job.state)

    def test_who_knows_of_it_has_left_and_keeps_the_reason_it_left_for(self) -> None:
        job, tasks = self.finished()
        for name in ("worker:0", "ps:0"):
            job.say(tasks[name], JobOverHeard())
        known = [job.state.tasks[name] for name in ("worker:0", "ps:0")]
        assert [(task.state, task.reason) for task in known] == [
            ("left", "worker:0 (pid 7 on h) left, failed: boom"),
            ("left", "the job is over"),
        ]

    def test_it_does_not_wait_for_the_lost(self) -> None:
        job, tasks = self.finished()
        job.say(tasks["worker:0"], JobOverHeard())
        job.say(tasks["ps:0"], JobOverHeard())
        job.wait(2.0)
        assert everybody_informed(job.now, job.state)

    def test_nor_longer_than_the_grace(self) -> None:
        job, _ = self.finished()
        job.wait(4.0)
        assert not everybody_informed(job.now, job.state)
        job.wait(1.0)
        assert everybody_informed(job.now, job.state)

    def test_a_latecomer_is_told(self) -> None:
        job, _ = self.finished()
        c = job.join("worker:1")
        assert job.to(c) == [over(job)]
        assert job.state.tasks["worker:1"].incarnation == 1
        job.say(c, JobOverHeard())
        assert job.closed == [c]

    def test_nothing_changes_it(self) -> None:
        job, tasks = self.finished()
        end = over(job)
        job.hang_up(tasks["ps:0"])
        job.wait(30.0)
        assert (over(job), job.state.phase) == (end, "failed")
        assert job.view.number == 1

    def test_the_word_that_it_is_over_means_nothing_before(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.say(tasks["worker:0"], JobOverHeard())
        assert job.state.tasks["worker:0"].state == "live" and job.sent == []


class TestEvents:
    def test_a_heartbeat_is_answered_and_its_status_kept(self) -> None:
        job = Driver()
        a = job.join_all()["worker:0"]
        job.now += 3.0
        job.say(a, Heartbeat({"step": 5, "phase": "training"}))
        assert job.sent == [(a, HeartbeatHeard(job.now))]
        task = job.state.tasks["worker:0"]
        assert task.status == {"step": 5, "phase": "training"} and task.heard == job.now

    def test_who_has_not_joined_may_not_speak(self) -> None:
        job = Driver()
        job.say(5, Heartbeat({}))
        assert job.closed == [5] and "Heartbeat" in job.reason

    def test_who_speaks_for_the_coordinator_is_cut_off(self) -> None:
        job = Driver()
        a = job.join_all()["worker:0"]
        job.say(a, ViewChanged(job.view))
        assert job.closed == [a]

    def test_the_state_given_is_not_changed(self) -> None:
        job = Driver(workers=1, servers=0)
        before = job.state
        copy = msgspec.structs.replace(before)
        job.join("worker:0")
        assert before == copy and job.state != before

    def test_a_tick_without_consequences_decides_nothing(self) -> None:
        job = Driver()
        job.join_all()
        before = job.state
        decision = step(job.now + 1.0, before, Tick())
        assert decision.state == before
        assert decision.instructions == () and decision.reason == ""


class TestStatus:
    def test_it_tells_each_task(self) -> None:
        job = Driver(workers=2, servers=1)
        a = job.join("worker:0", pid=42)
        job.say(a, Heartbeat({"step": 5}))
        job.now += 2.5
        status = cluster_status(job.now, job.state)
        assert (status.phase, status.view) == ("forming", 0)
        assert status.missing == ("ps:0", "worker:1")
        server, worker, other = status.tasks
        assert (server.role, server.state, server.quiet_seconds) == ("ps", "expected", -1.0)
        assert (worker.index, worker.state, worker.incarnation) == (0, "live", 1)
        assert (worker.host, worker.pid, worker.status) == ("h", 42, {"step": 5})
        assert worker.quiet_seconds == 2.5
        assert other.incarnation == 0

    def test_a_running_job_misses_nobody(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        job.wait(3.0, tasks["ps:0"], tasks["worker:0"])
        status = cluster_status(job.now, job.state)
        assert (status.phase, status.view, status.missing) == ("running", 2, ())
        assert status.tasks[2].state == "lost" and "closed" in status.tasks[2].reason

    def test_a_job_without_workers_misses_them(self) -> None:
        job = Driver(workers=1, wait_for_restart=20.0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:0"])
        job.wait(3.0, tasks["ps:0"])
        assert cluster_status(job.now, job.state).missing == ("worker:0",)

    def test_the_end_is_there(self) -> None:
        job = Driver()
        tasks = job.join_all()
        job.leave(tasks["worker:0"], "failed", "boom")
        status = cluster_status(job.now, job.state)
        assert status.phase == "failed" and "boom" in status.reason


def test_what_nobody_sets_is_the_same_in_a_policy_as_in_a_task() -> None:
    policy, task = Policy(workers=1, servers=0), TaskConfig(job="j", role="worker")
    assert policy.join_timeout == task.config.timeouts.join_timeout
    assert policy.progress_timeout == task.config.timeouts.progress_timeout
    assert policy.heartbeat_timeout == task.config.timeouts.heartbeat_timeout


class TestReasons:
    """What the log says of each event: who, what and why."""

    def test_who_joins_is_named_with_its_start(self) -> None:
        job = Driver(workers=1, servers=0)
        job.join("worker:0", pid=42)
        assert job.reason == (
            "worker:0 (pid 42 on h) is connected as incarnation 1; every task has come; "
            "view 1: workers 0, 0 servers"
        )
        assert job.state.reason == "every task has come"

    def test_who_is_refused_is_named_with_the_reason(self) -> None:
        job = Driver(workers=1, servers=0)
        a = job.join("worker:0", pid=42)
        job.now += 3.0
        b = job.join("worker:0", pid=43)
        ((connection, refusal),) = job.sent
        assert connection == b and isinstance(refusal, RequestRefused)
        assert job.reason == f"worker:0 was refused: {refusal.reason}"
        assert refusal.reason == (
            "worker:0 is held by pid 42 on h, last heard 3.0 s ago: end that process first, or "
            "give this one an index of its own"
        )
        assert job.state.holder(a) is not None

    def test_a_task_outside_is_told_how_many_there_are(self) -> None:
        for workers, said in ((1, "which has 1 task of role worker"), (2, "which has 2 tasks of")):
            job = Driver(workers=workers, servers=0)
            job.join("worker:7")
            ((_, refusal),) = job.sent
            assert isinstance(refusal, RequestRefused) and said in refusal.reason

    def test_a_latecomer_is_noted(self) -> None:
        job = Driver(workers=1, servers=0)
        a = job.join("worker:0")
        job.leave(a, "finished")
        b = job.join("worker:0")
        assert job.sent == [(b, over(job))]
        assert job.reason == "worker:0 came after the job was over"

    def test_a_heartbeat_and_what_is_out_of_place(self) -> None:
        job = Driver(workers=1, servers=0)
        a = job.join("worker:0")
        job.say(a, Heartbeat({}))
        assert job.reason == "worker:0 is alive"
        job.say(9, Heartbeat({}))
        assert job.reason == "the connection of no task is closed: Heartbeat was not expected"
        job.say(a, HeartbeatHeard())
        assert job.reason.startswith(
            "the connection of worker:0 (pid 7 on h) is closed: HeartbeatHeard was not expected; "
            "worker:0 (pid 7 on h) is cut off: HeartbeatHeard was not expected"
        )
        task = job.state.tasks["worker:0"]
        assert task.reason == "its connection closed (HeartbeatHeard was not expected)"
        assert (task.state, task.connection, task.since) == ("disconnected", None, job.now)

    def test_who_is_cut_off_and_lost(self) -> None:
        job = Driver(workers=2, servers=0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        assert job.reason == "worker:1 (pid 7 on h) is cut off: the peer closed it"
        job.now += 2.0
        job.feed(Tick())
        why = "its connection closed (the peer closed it), and it did not come back within 2.0 s"
        assert job.reason == (
            f"worker:1 (pid 7 on h) was lost: {why}; view 2: workers 0, 0 servers"
        )
        assert job.state.tasks["worker:1"].reason == why

    def test_who_is_silent_is_lost(self) -> None:
        job = Driver(workers=2, servers=0)
        tasks = job.join_all()
        job.wait(9.0, tasks["worker:0"])
        job.now += 1.0
        job.say(tasks["worker:0"], Heartbeat({}))
        job.feed(Tick())
        assert "worker:1 (pid 7 on h) was lost: it sent nothing for 10.0 s" in job.reason
        assert job.closed == [tasks["worker:1"]]

    def test_who_leaves_says_how(self) -> None:
        job = Driver(workers=2, servers=0)
        tasks = job.join_all()
        job.leave(tasks["worker:1"], "finished", "it is done")
        assert job.reason.startswith("worker:1 (pid 7 on h) left, finished: it is done")
        job.leave(tasks["worker:1"], "finished")
        assert job.sent == [(tasks["worker:1"], Left())]
        assert job.reason == "worker:1 (pid 7 on h) left, finished"
        job.leave(tasks["worker:0"], "finished")
        assert job.reason.endswith("the job is over, finished: every worker has finished")
        job.say(tasks["worker:0"], JobOverHeard())
        assert job.reason == "worker:0 knows that the job is over"
        assert job.closed == [tasks["worker:0"]]
        assert job.state.tasks["worker:0"].connection is None

    def test_a_pause_moves_every_deadline(self) -> None:
        job = Driver(workers=3, servers=0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:1"])
        job.wait(2.0, tasks["worker:0"], tasks["worker:2"])
        job.hang_up(tasks["worker:2"])
        before = job.state.tasks
        job.now += 60.0
        job.feed(Paused(60.0))
        assert job.reason == ("the coordinator was stalled for 60.0 s: no task is given up")
        for name, waited in (("worker:0", 0.0), ("worker:1", 60.0), ("worker:2", 60.0)):
            task = job.state.tasks[name]
            assert task.heard == before[name].heard + 60.0
            assert task.since == before[name].since + waited
        assert [task.state for task in job.state.tasks.values()] == ["live", "lost", "disconnected"]

    def test_those_who_are_waited_for_are_noted(self) -> None:
        job = Driver(workers=2, servers=0, join_timeout=60.0)
        a = job.join("worker:0")
        job.wait(5.0, a)
        assert job.reason == "waiting for worker:1, 55 s more"


class TestFailures:
    def test_a_worker_that_fails_after_a_server_went_names_the_first_of_them(self) -> None:
        job = Driver(workers=2, servers=2)
        tasks = job.join_all()
        job.hang_up(tasks["ps:1"])
        job.now += 0.5
        job.hang_up(tasks["ps:0"])
        job.now += 0.5
        job.leave(tasks["worker:0"], "failed", "no server")
        end = over(job)
        assert (end.outcome, end.culprit) == ("failed", "ps:1")
        assert end.reason == (
            "ps:1 (pid 7 on h) went away: its connection closed (the peer closed it); 1.0 s later "
            "worker:0 (pid 7 on h) failed: no server"
        )

    def test_a_server_that_fails_is_the_culprit_itself(self) -> None:
        job = Driver(workers=1, servers=2)
        tasks = job.join_all()
        job.hang_up(tasks["ps:1"])
        job.leave(tasks["ps:0"], "failed", "no memory")
        assert (over(job).culprit, over(job).reason) == (
            "ps:0",
            "ps:0 (pid 7 on h) failed: no memory",
        )

    @pytest.mark.parametrize(("outcome", "how"), [("finished", "failed"), ("interrupted",) * 2])
    def test_a_server_that_leaves_too_early_ends_the_job(self, outcome: Outcome, how: str) -> None:
        job = Driver(workers=1, servers=1)
        tasks = job.join_all()
        job.leave(tasks["ps:0"], outcome)
        end = over(job)
        assert (end.outcome, end.culprit) == (how, "ps:0")
        assert end.reason.endswith(f"left, {outcome}, while workers still needed its parameters")

    def test_an_incarnation_that_was_never_given_and_one_that_was_given_up(self) -> None:
        job = Driver(workers=2, servers=0)
        tasks = job.join_all()
        job.join("worker:0", incarnation=2)
        ((_, unknown),) = job.sent
        assert isinstance(unknown, RequestRefused) and unknown.code == "unknown"
        job.hang_up(tasks["worker:0"])
        job.join("worker:0")
        job.join("worker:0", incarnation=1)
        ((_, superseded),) = job.sent
        assert isinstance(superseded, RequestRefused) and superseded.code == "superseded"
        assert superseded.reason.startswith("worker:0 (pid 7 on h) is now incarnation 2 of this")

    def test_who_comes_back_is_live_since_then(self) -> None:
        job = Driver(workers=2, servers=0)
        tasks = job.join_all()
        job.hang_up(tasks["worker:0"])
        job.now += 1.0
        again = job.join("worker:0", incarnation=1)
        task = job.state.tasks["worker:0"]
        assert (task.state, task.reason, task.since) == ("live", "it connected again", job.now)
        assert (task.heard, task.connection) == (job.now, again)
        job.now += 1.0
        newer = job.join("worker:0", incarnation=1)
        assert job.state.tasks["worker:0"].since == job.now - 1.0, "it was live before"
        assert job.closed == [again]
        assert job.state.tasks["worker:0"].connection == newer

    def test_a_new_process_shows_where_it_is(self) -> None:
        job = Driver(workers=1, servers=1)
        job.join("ps:0", pid=3)
        task = job.state.tasks["ps:0"]
        assert (task.host, task.pid, task.address) == ("h", 3, "tcp://h:0")
        assert (task.reason, task.since, task.incarnation) == ("it joined", job.now, 1)


def test_the_last_view_of_a_term_is_followed_by_the_first_of_the_next() -> None:
    for term in (1, 2, 7):
        assert first_view(term) < first_view(term + 1) - (1 << 31)

"""A job that grows and shrinks while it runs; and the news that a process has ended."""

from __future__ import annotations

import pytest

from tests.cluster.driver import Driver, Job
from trireme.cluster.coordinator import resumed
from trireme.cluster.membership import ProcessEnded, Received, Stop, Tick
from trireme.cluster.messages import (
    Dismissed,
    Interrupted,
    JobOver,
    JobOverHeard,
    LastStepSaved,
    Left,
    RequestRefused,
    Scale,
    Scaled,
    Signalled,
    ViewChanged,
)
from trireme.cluster.scaling import DEPARTURE, DISMISSAL
from trireme.cluster.state import cluster_status

DISMISSED = Dismissed(DISMISSAL)


def elastic(servers: int = 2, replicas: int = 1, **options: float | bool) -> Job:
    return Job(servers, replicas, elastic=True, **options)


def dismissed(job: Job) -> set[int]:
    """The connections on which the last event sent a dismissal."""
    return {connection for connection, message in job.sent if message == DISMISSED}


class TestGrowth:
    def test_there_is_room_for_tasks_that_are_asked_for(self) -> None:
        job = elastic()
        answer = job.scale(servers=3, workers=4)
        assert answer == Scaled(3, 4, ("ps:2", "worker:2", "worker:3"), ())
        assert list(job.state.tasks) == [
            "ps:0", "ps:1", "ps:2", "worker:0", "worker:1", "worker:2", "worker:3",
        ]  # fmt: skip
        job.come("worker:3")
        job.come("ps:2")
        assert job.workers == {0: 1, 1: 1, 3: 1}
        job.settle()
        assert {copies[0] for _, _, copies in job.placement} == {0, 1, 2}
        status = cluster_status(job.now, job.state)
        assert (status.servers, status.workers, status.missing) == (3, 4, ())

    def test_the_next_task_joins_by_itself(self) -> None:
        job = elastic()
        job.come("worker:2")
        assert job.workers == {0: 1, 1: 1, 2: 1}
        job.come("ps:2")
        job.settle()
        assert {copies[0] for _, _, copies in job.placement} == {0, 1, 2}

    @pytest.mark.parametrize("name", ["worker:3", "ps:4", "coordinator:0", "coordinator:1"])
    def test_another_one_does_not(self, name: str) -> None:
        job = elastic()
        [refused] = job.to(job.join(name))
        assert isinstance(refused, RequestRefused) and refused.code == "outside"
        assert name not in job.state.tasks

    def test_nor_where_the_job_keeps_its_size(self) -> None:
        job = Job(2, 1)
        [refused] = job.to(job.join("worker:2"))
        assert isinstance(refused, RequestRefused) and refused.code == "outside"
        answer = job.scale(workers=3)
        assert isinstance(answer, RequestRefused) and answer.code == "scale"
        assert "keeps the number of tasks" in answer.reason

    def test_nor_before_it_runs(self) -> None:
        job = Driver(workers=1, servers=1, elastic=True)
        [refused] = job.to(job.join("worker:1"))
        assert isinstance(refused, RequestRefused) and refused.code == "outside"

    def test_a_job_that_forms_is_scaled_too(self) -> None:
        job = Driver(workers=2, servers=1, elastic=True)
        a = job.join("worker:1")
        job.feed(Received(0, Scale(servers=2, workers=1), 5))
        assert job.to(0) == [Scaled(2, 1, ("ps:0", "ps:1"), ())]
        assert job.state.tasks["worker:0"].dismissed, "it is not there yet"
        job.join("ps:0")
        assert job.state.phase == "forming"
        job.join("ps:1")
        assert job.state.phase == "running"
        assert [shard.primary for shard in job.view.shards] == [0, 1]
        assert job.views_sent() and a in {connection for connection, _ in job.views_sent()}


class TestRefusals:
    @pytest.mark.parametrize(
        ("servers", "workers", "said"),
        [
            (1, None, "at least 2"),
            (0, None, "at least 2"),
            (257, None, "256 slots"),
            (None, 0, "at least 1 worker"),
            (None, 1025, "1024 workers at most"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, servers: int | None, workers: int | None, said: str
    ) -> None:
        job = elastic(servers=3, replicas=2)
        before = job.state.tasks
        answer = job.scale(servers, workers)
        assert isinstance(answer, RequestRefused) and said in answer.reason
        assert job.state.tasks == before

    def test_a_job_without_servers_gets_none(self) -> None:
        job = Driver(workers=1, servers=0, elastic=True)
        job.join_all()
        job.feed(Received(0, Scale(servers=1), 1))
        [refused] = job.to(0)
        assert isinstance(refused, RequestRefused) and "without parameter servers" in refused.reason
        [refused] = job.to(job.join("ps:0"))
        assert isinstance(refused, RequestRefused) and refused.code == "outside"

    def test_a_job_that_is_over_stays_as_it_is(self) -> None:
        job = elastic()
        for worker in (0, 1):
            job.leave(job.held[f"worker:{worker}"], "finished")
        answer = job.scale(workers=4)
        assert isinstance(answer, RequestRefused) and answer.reason == "the job is over"

    def test_a_member_may_not_ask(self) -> None:
        job = elastic()
        worker = job.held["worker:0"]
        job.say(worker, Scale(workers=5))
        assert job.closed == [worker] and "worker:5" not in job.state.tasks


class TestShrinking:
    def test_a_worker_is_told_at_once_and_the_others_go_on(self) -> None:
        job = elastic()
        worker = job.held["worker:1"]
        answer = job.scale(workers=1)
        assert answer == Scaled(2, 1, (), ("worker:1",))
        assert dismissed(job) == {worker}
        assert job.workers == {0: 1, 1: 1}, "it finishes its update"
        job.feed(Tick())
        assert dismissed(job) == set(), "it is told once"
        job.leave(worker, "finished")
        assert job.workers == {0: 1} and job.state.over is None

    def test_a_server_is_told_when_nothing_depends_on_it(self) -> None:
        job = elastic(servers=3, replicas=2)
        server = job.held["ps:2"]
        job.scale(servers=2)
        assert dismissed(job) == set()
        assert job.state.tasks["ps:2"].state == "live"
        told = False
        for _ in range(20):
            job.settle_once()
            told = told or server in dismissed(job)
            needed = any(2 in (*each.copies, *each.joining) for each in job.view.shards)
            assert needed or job.view.next_shards or told
            assert not (needed and told)
        assert told
        assert job.placement == [(0, 128, (0, 1)), (128, 256, (1, 0))]
        assert job.view.server(2) is not None
        job.leave(server, "finished")
        assert job.view.server(2) is None and job.state.over is None

    def test_the_last_of_a_role_stays(self) -> None:
        job = elastic(servers=1)
        assert isinstance(job.scale(servers=0), RequestRefused)
        assert isinstance(job.scale(workers=0), RequestRefused)

    def test_those_that_are_lost_go_first(self) -> None:
        job = elastic()
        job.lose("worker:0")
        job.scale(workers=1)
        assert dismissed(job) == set()
        [refused] = job.to(job.join("worker:0"))
        assert isinstance(refused, RequestRefused) and refused.code == "dismissed"
        assert job.workers == {1: 1}

    def test_one_that_dies_before_it_has_left_is_not_waited_for(self) -> None:
        job = elastic(servers=3, replicas=1, survives_loss=True)
        job.scale(servers=2, workers=1)
        job.lose("ps:2")
        assert job.view.life == 1, "its shard was there alone"
        job.lose("worker:1")
        assert job.state.over is None and cluster_status(job.now, job.state).missing == ()
        job.leave(job.held["worker:0"], "finished")
        assert job.state.over is not None and job.state.over.outcome == "finished"

    def test_a_server_that_leaves_takes_over_nothing(self) -> None:
        job = elastic(servers=1, survives_loss=True, wait_for_restart=20.0)
        job.come("ps:1")
        job.scale(servers=1)
        assert dismissed(job) == {job.held["ps:1"]}
        job.lose("ps:0")
        assert job.view.life == 0 and cluster_status(job.now, job.state).missing == ("ps:0",)
        job.come("ps:0")
        assert job.placement == [(0, 256, (0,))] and job.view.life == 1

    def test_a_dismissed_worker_that_leaves_has_not_finished_the_job(self) -> None:
        job = elastic()
        job.scale(workers=1)
        job.leave(job.held.pop("worker:1"), "finished")
        job.lose("worker:0")
        over = job.state.over
        assert over is not None and (over.outcome, over.culprit) == ("failed", "worker:0")

    def test_who_connects_again_is_told_again(self) -> None:
        job = elastic()
        job.scale(workers=1)
        job.hang_up(job.held["worker:1"])
        again = job.join("worker:1", incarnation=1)
        assert job.to(again)[-1] == DISMISSED

    def test_a_server_that_is_drained_may_stay_after_all(self) -> None:
        job = elastic(servers=3, replicas=2)
        job.scale(servers=2)
        job.feed(Tick())
        assert job.view.next_shards
        job.scale(servers=3)
        assert not job.state.tasks["ps:2"].dismissed
        job.settle()
        assert {copies[0] for _, _, copies in job.placement} == {0, 1, 2}

    def test_an_index_is_used_again(self) -> None:
        job = elastic()
        job.scale(workers=1)
        job.leave(job.held["worker:1"], "finished")
        assert job.scale(workers=2) == Scaled(2, 2, ("worker:1",), ())
        job.come("worker:1")
        assert job.workers == {0: 1, 1: 2}

    def test_scaling_in_the_middle_of_a_reconfiguration_comes_to_rest(self) -> None:
        job = elastic(servers=3, replicas=2)
        job.scale(servers=4)
        job.come("ps:3")
        job.feed(Tick())
        job.report_ready(0)
        job.scale(servers=2)
        job.settle()
        assert {server for _, _, copies in job.placement for server in copies} == {0, 1}
        assert {task.name for task in job.state.tasks.values() if task.notified} == {"ps:2", "ps:3"}


class TestProcessesThatEnd:
    def ended(self, job: Driver, name: str, pid: int = 7, host: str = "h") -> None:
        job.feed(ProcessEnded(name, host, pid, "killed by SIGKILL"))

    def test_it_is_given_up_at_once(self) -> None:
        job = Job(3, 2)
        worker = job.held["worker:1"]
        self.ended(job, "worker:1")
        assert job.workers == {0: 1} and job.closed == [worker]
        assert job.state.tasks["worker:1"].reason == "its process ended: killed by SIGKILL"
        self.ended(job, "ps:0")
        assert job.placement[0] == (0, 85, (1,))

    def test_also_when_its_connection_has_closed(self) -> None:
        job = Job(3, 2)
        job.hang_up(job.held["ps:0"])
        self.ended(job, "ps:0")
        assert job.placement[0] == (0, 85, (1,))

    @pytest.mark.parametrize(("pid", "host"), [(8, "h"), (7, "g")])
    def test_another_process_is_not_meant(self, pid: int, host: str) -> None:
        job = Job(3, 2)
        before = job.view
        self.ended(job, "ps:0", pid, host)
        assert job.view == before

    @pytest.mark.parametrize("name", ["worker:9", "coordinator:0", "nobody:3"])
    def test_a_task_that_there_is_not_is_nobodys_loss(self, name: str) -> None:
        job = Job(3, 2)
        before = job.state.tasks
        self.ended(job, name)
        assert job.state.tasks == before

    def test_who_has_left_is_not_lost(self) -> None:
        job = Job(3, 2)
        job.leave(job.held["worker:1"], "finished")
        self.ended(job, "worker:1")
        assert job.state.tasks["worker:1"].state == "left"

    def test_when_the_job_is_over_it_is_not_waited_for(self) -> None:
        job = Job(1, 1)
        for worker in (0, 1):
            job.leave(job.held[f"worker:{worker}"], "finished")
        job.say(job.held["worker:0"], JobOverHeard())
        self.ended(job, "ps:0")
        assert job.state.over is not None and job.state.over.outcome == "finished"


LEAVE = Dismissed(DEPARTURE)
TERM = Signalled("SIGTERM")


class Signals(Driver):
    """Drives a job of two servers and some workers, all of which have joined."""

    def __init__(self, workers: int = 3, servers: int = 2, *, elastic: bool = True) -> None:
        super().__init__(workers=workers, servers=servers, elastic=elastic)
        self.at = {name: self.join(name) for name in list(self.state.tasks)}

    def signal(self, name: str, message: Signalled = TERM) -> None:
        """Says that a signal asks a task to end."""
        self.feed(Received(self.at[name], message))

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, in which all tasks are heard."""
        self.wait(seconds, *self.at.values())

    @property
    def stops(self) -> set[str]:
        """The workers to which the last event said that the job stops."""
        return {
            name
            for name, connection in self.at.items()
            if any(isinstance(message, Interrupted) for message in self.to(connection))
        }


def test_a_worker_alone_leaves_when_the_others_were_not_asked() -> None:
    job = Signals()
    job.signal("worker:0")
    assert job.sent == []
    job.pass_time(1.9)
    assert job.sent == []
    job.pass_time(0.2)
    assert job.sent == [(job.at["worker:0"], LEAVE)]
    assert job.workers == {0: 1, 1: 1, 2: 1}, "it still finishes its update"
    job.leave(job.at["worker:0"], "interrupted", "SIGTERM")
    assert job.to(job.at["worker:0"]) == [Left()]
    assert job.workers == {1: 1, 2: 1} and job.view.chief == 1
    assert job.state.tasks["worker:0"].state == "lost"
    assert job.state.over is None


def test_another_process_takes_the_place_of_one_that_left() -> None:
    job = Signals()
    job.signal("worker:2")
    job.pass_time(2.1)
    job.leave(job.at["worker:2"], "interrupted", "SIGTERM")
    again = job.join("worker:2", pid=77)
    assert LEAVE not in job.to(again)
    assert job.workers == {0: 1, 1: 1, 2: 2}


def test_one_that_left_has_not_finished_the_job() -> None:
    job = Signals(workers=2)
    job.signal("worker:1")
    job.pass_time(2.1)
    job.leave(job.at["worker:1"], "interrupted", "SIGTERM")
    job.leave(job.at["worker:0"], "finished")
    assert job.state.over is not None
    assert job.state.over.outcome == "finished"
    assert "lost on the way: worker:1" in job.state.over.reason


@pytest.mark.parametrize("seconds", [0.0, 2.1])
@pytest.mark.parametrize("killed", [True, False])
def test_a_chief_asked_to_end_after_its_last_save_does_not_fail_the_job(
    killed: bool, seconds: float
) -> None:
    """Its program had still something to do when the others had finished."""
    job = Signals(workers=2)
    job.feed(Received(job.at["worker:0"], LastStepSaved(7)))
    job.signal("worker:0")
    job.pass_time(seconds)  # then it leaves alone; else, as the last worker, it stops the job
    job.leave(job.at["worker:1"], "finished", chief=False)
    if killed:
        job.hang_up(job.at.pop("worker:0"))
        job.pass_time(3.0)
    else:
        job.leave(job.at["worker:0"], "interrupted", "SIGTERM", chief=False)
    assert job.state.over is not None and job.state.over.outcome == "interrupted"


def test_the_only_worker_killed_after_its_last_save_and_a_signal_does_not_fail_the_job() -> None:
    for signalled, outcome in ((True, "interrupted"), (False, "failed")):
        job = Signals(workers=1)
        job.feed(Received(job.at["worker:0"], LastStepSaved(7)))
        if signalled:
            job.signal("worker:0")
        job.hang_up(job.at.pop("worker:0"))
        job.pass_time(3.0)
        assert job.state.over is not None and job.state.over.outcome == outcome


def test_signals_to_all_workers_within_the_settling_time_stop_the_job() -> None:
    job = Signals()
    for name in ("worker:2", "worker:0"):
        job.signal(name)
        job.pass_time(0.5)
        assert job.stops == set()
    job.signal("worker:1")
    assert job.stops == {"worker:0", "worker:1", "worker:2"}
    assert job.state.stopping == "SIGTERM to all 3 workers"
    for name in ("worker:0", "worker:1", "worker:2"):
        job.leave(job.at[name], "interrupted", job.state.stopping)
    assert job.state.over is not None and job.state.over.outcome == "interrupted"


def test_the_last_of_those_that_leave_one_by_one_stops_the_job() -> None:
    job = Signals(workers=2)
    job.signal("worker:0")
    job.pass_time(2.1)
    job.signal("worker:1")
    assert job.stops == {"worker:0", "worker:1"}, "also the one that has not left yet"


@pytest.mark.parametrize("name", ["ps:0", "ps:1"])
def test_a_signal_to_a_server_stops_the_job(name: str) -> None:
    job = Signals()
    job.signal(name)
    assert job.stops == {"worker:0", "worker:1", "worker:2"}
    assert job.state.stopping == f"SIGTERM to {name}"


def test_ctrl_c_at_one_worker_stops_the_job() -> None:
    job = Signals()
    job.signal("worker:1", Signalled("SIGINT", True))
    assert job.stops == {"worker:0", "worker:1", "worker:2"}


def test_a_job_that_keeps_its_workers_stops() -> None:
    job = Signals(elastic=False)
    job.signal("worker:1")
    assert job.stops == {"worker:0", "worker:1", "worker:2"}


def test_a_signal_to_the_coordinator_stops_the_job_once() -> None:
    job = Signals()
    job.feed(Stop("SIGTERM to coordinator:0"))
    assert job.stops == {"worker:0", "worker:1", "worker:2"}
    job.feed(Stop("SIGTERM to coordinator:0"))
    assert job.sent == []


def test_a_worker_that_connects_again_hears_what_it_missed() -> None:
    job = Signals()
    job.signal("worker:1")
    job.pass_time(2.1)
    assert LEAVE in job.to(job.join("worker:1", incarnation=1))
    job.feed(Stop("SIGTERM to coordinator:0"))
    missed = job.to(job.join("worker:0", incarnation=1))
    assert Interrupted("SIGTERM to coordinator:0") in missed
    assert any(isinstance(message, ViewChanged) for message in missed)


def test_a_coordinator_that_is_started_again_waits_anew() -> None:
    job = Signals()
    job.signal("worker:1")
    job.state = resumed(job.now, job.state)
    for name in job.at:
        job.at[name] = job.join(name, incarnation=1)
    job.pass_time(1.9)
    assert job.sent == []
    job.pass_time(0.2)
    assert job.sent == [(job.at["worker:1"], LEAVE)]


def test_a_job_that_forms_ends_at_once() -> None:
    job = Driver(workers=2, servers=1, elastic=True)
    server = job.join("ps:0")
    job.feed(Received(server, TERM))
    assert job.state.over is not None
    assert job.state.over == JobOver(
        "interrupted", "ps:0", "SIGTERM to ps:0, before the job had begun"
    )


def test_a_worker_that_is_started_again_saves_a_job_that_stops() -> None:
    job = Driver(workers=1, servers=1, elastic=True, wait_for_restart=60.0)
    server, worker = job.join("ps:0"), job.join("worker:0")
    job.hang_up(worker)
    job.wait(3.0, server)
    job.feed(Received(server, TERM))
    assert job.state.over is None
    assert Interrupted("SIGTERM to ps:0") in job.to(job.join("worker:0", pid=8))


def test_a_job_without_a_worker_fails_if_none_is_started_again() -> None:
    job = Driver(workers=1, servers=1, elastic=True, wait_for_restart=60.0)
    server, worker = job.join("ps:0"), job.join("worker:0")
    job.hang_up(worker)
    job.wait(3.0, server)
    job.feed(Stop("SIGTERM to coordinator:0", final=True))
    assert job.state.over is not None and job.state.over.outcome == "failed"

"""A worker that beats and makes no steps: named, then put out; by a clock moved by hand."""

from __future__ import annotations

import pytest

from tests.cluster.driver import Driver, Job
from trireme.cluster.membership import Paused, Tick
from trireme.cluster.messages import Heartbeat, Joined, RequestRefused, StatusValue
from trireme.cluster.progress import FIRST_BATCH, STUCK, UNREACHED, is_absent


def stuck_of(job: Driver) -> list[str]:
    """What the coordinator adds to the statuses of tasks that are stuck."""
    tasks = job.state.tasks.values()
    return [str(task.status[STUCK]) for task in tasks if STUCK in task.status]


class Stuck:
    """Two workers that make a step a second each; then worker:1 makes none."""

    def __init__(self, **options: float | bool) -> None:
        self.job = Driver(workers=2, servers=1, **options)
        self.connections = self.job.join_all()
        self.steps = {"worker:0": 0, "worker:1": 0}
        self.reasons: list[str] = []
        self.go(10)

    def go(self, seconds: int, *stuck: str, **status: StatusValue) -> None:
        """Lets seconds pass; `status` is what the stuck ones say besides."""
        job = self.job
        for _ in range(seconds):
            job.now += 1.0
            for name, connection in self.connections.items():
                if job.state.holder(connection) is None:
                    continue
                if name not in self.steps:
                    job.say(connection, Heartbeat({}))
                    continue
                own = status if name in stuck else {}
                self.steps[name] += name not in stuck
                job.say(connection, Heartbeat({"progress": self.steps[name], **own}))
            job.feed(Tick())
            self.reasons.append(job.reason)

    @property
    def state(self) -> str:
        return self.job.state.tasks["worker:1"].state

    @property
    def findings(self) -> list[str]:
        return stuck_of(self.job)


def test_it_is_named_after_several_of_its_usual_steps() -> None:
    stuck = Stuck()
    stuck.go(9, "worker:1", at="program.py:7 in load")
    assert not any("stuck" in reason for reason in stuck.reasons)
    assert stuck.findings == []
    stuck.go(2, "worker:1", at="program.py:7 in load")
    (named,) = [reason for reason in stuck.reasons if "stuck" in reason]
    assert "worker:1 (pid 7 on h) is stuck: it lives, and has made no step for 10 s" in named
    assert "where its steps take 1 s; its main thread is at program.py:7 in load" in named
    (finding,) = stuck.findings
    assert finding.startswith("it lives, and has made no step for 11 s")
    assert stuck.state == "live"


def test_slow_steps_are_not_stuck() -> None:
    stuck = Stuck()
    for _ in range(20):  # its steps come to take 8 s
        stuck.go(7, "worker:1")
        stuck.go(1)
    stuck.go(40, "worker:1")
    assert not any("stuck" in reason for reason in stuck.reasons)


def test_it_is_put_out_at_the_deadline_and_named_as_the_reason() -> None:
    stuck = Stuck(progress_timeout=60.0)
    stuck.go(59, "worker:1", at="program.py:7 in load")
    assert stuck.state == "live"
    assert stuck.job.workers == {0: 1, 1: 1}
    stuck.go(1, "worker:1", at="program.py:7 in load")
    assert stuck.state == "lost"
    assert stuck.job.workers == {0: 1}
    assert "no step for 60 s" in stuck.job.state.tasks["worker:1"].reason
    assert stuck.job.state.over is None


@pytest.mark.parametrize(
    "status",
    [
        {"excuse": "it evaluates"},
        {"excuse": "a debugger holds it"},
        {"excuse": "it waits for the answer to its push"},
    ],
)
def test_an_excuse_suspends_the_deadline(status: dict[str, StatusValue]) -> None:
    stuck = Stuck(progress_timeout=60.0)
    stuck.go(50, "worker:1")
    stuck.go(1000, "worker:1", **status)
    stuck.go(59, "worker:1")
    assert stuck.state == "live"
    stuck.go(1, "worker:1")
    assert stuck.state == "lost"


def test_before_the_first_step_nobody_is_late() -> None:
    job = Driver(workers=1, servers=0, progress_timeout=5.0)
    a = job.join("worker:0")
    for _ in range(100):
        job.now += 1.0
        job.say(a, Heartbeat({"progress": 0}))
        job.feed(Tick())
    assert job.state.tasks["worker:0"].state == "live"


def test_who_waits_for_its_first_batch_is_named_after_a_minute_and_kept() -> None:
    job = Driver(workers=1, servers=0, progress_timeout=5.0)
    a = job.join("worker:0")
    reasons = []

    def wait(seconds: int, **status: StatusValue) -> None:
        for _ in range(seconds):
            job.now += 1.0
            job.say(a, Heartbeat({"progress": 0, **status}))
            job.feed(Tick())
            reasons.append(job.reason)

    wait(100, excuse="no step was made yet")
    wait(60, excuse=FIRST_BATCH, at="program.py:7 in train")
    assert not any("stuck" in reason for reason in reasons)
    wait(1000, excuse=FIRST_BATCH, at="program.py:7 in train")
    (named,) = [reason for reason in reasons if "stuck" in reason]
    assert "has made no step for 60 s; its main thread is at program.py:7 in train" in named
    (finding,) = stuck_of(job)
    assert finding.startswith("it lives, and has made no step for 1059 s")
    wait(1, excuse="no step was made yet")
    assert stuck_of(job) == []
    assert job.state.tasks["worker:0"].state == "live"


def test_who_goes_on_is_late_no_longer() -> None:
    stuck = Stuck(progress_timeout=60.0)
    stuck.go(30, "worker:1")
    assert stuck.findings
    stuck.go(1)
    assert stuck.findings == []
    stuck.go(59, "worker:1")
    assert stuck.state == "live"


def test_without_a_deadline_it_is_only_named() -> None:
    stuck = Stuck(progress_timeout=0.0)
    stuck.go(5000, "worker:1")
    assert stuck.state == "live"
    assert len([reason for reason in stuck.reasons if "stuck" in reason]) == 1


def test_the_process_that_was_put_out_does_not_come_back_and_a_new_one_does() -> None:
    stuck = Stuck(progress_timeout=60.0)
    stuck.go(60, "worker:1")
    back = stuck.job.join("worker:1", incarnation=1)
    (refusal,) = stuck.job.to(back)
    assert isinstance(refusal, RequestRefused) and refusal.code == "superseded"
    assert "no step for 60 s" in refusal.reason and "--progress-timeout" in refusal.reason
    stuck.job.join("worker:1", pid=8)
    assert stuck.job.workers == {0: 1, 1: 2}


def test_the_coordinators_own_standstill_counts_for_nobody() -> None:
    stuck = Stuck(progress_timeout=60.0)
    stuck.go(50, "worker:1")
    stuck.job.now += 100.0
    stuck.job.feed(Paused(100.0))
    stuck.go(9, "worker:1")
    assert stuck.state == "live"
    stuck.go(1, "worker:1")
    assert stuck.state == "lost"


def test_a_server_makes_no_steps_and_is_never_late() -> None:
    stuck = Stuck(progress_timeout=5.0)
    stuck.go(100)
    assert stuck.job.state.tasks["ps:0"].state == "live"


class StuckServer:
    """A job with copies; the loop of ps:1 gives no sign from some time on, and its heart beats."""

    def __init__(self) -> None:
        self.job = Job(servers=3, replicas=2, heartbeat_timeout=10.0)
        self.signs = 0
        self.go(5)

    def go(self, seconds: int, *, stuck: bool = False) -> None:
        job = self.job
        for _ in range(seconds):
            job.now += 1.0
            self.signs += not stuck
            for name, connection in job.held.items():
                own: dict[str, StatusValue] = {"progress": self.signs} if name == "ps:1" else {}
                if stuck and own:
                    own["at"] = "records.py:126 in write"
                job.say(connection, Heartbeat(own))
            job.feed(Tick())
            if job.state.tasks["ps:1"].state == "lost":
                job.held.pop("ps:1", None)


def test_a_server_whose_loop_gives_no_sign_is_lost_at_the_heartbeats_deadline() -> None:
    stuck = StuckServer()
    stuck.go(9, stuck=True)
    assert stuck.job.state.tasks["ps:1"].state == "live"
    stuck.go(1, stuck=True)
    task = stuck.job.state.tasks["ps:1"]
    assert task.state == "lost"
    assert task.reason == (
        "it lives, and its service has done nothing for 10 s; its main thread is at "
        "records.py:126 in write"
    )
    assert all(1 not in shard.copies for shard in stuck.job.view.shards)


def test_a_server_whose_loop_goes_on_joins_again_as_another() -> None:
    stuck = StuckServer()
    stuck.go(10, stuck=True)
    stuck.job.join("ps:1", incarnation=1)
    task = stuck.job.state.tasks["ps:1"]
    assert (task.state, task.incarnation) == ("live", 2)


def test_a_stall_of_the_coordinator_is_no_standstill_of_a_server() -> None:
    stuck = StuckServer()
    stuck.go(5, stuck=True)
    stuck.job.feed(Paused(30.0))
    stuck.job.now += 30.0
    stuck.go(4, stuck=True)
    assert stuck.job.state.tasks["ps:1"].state == "live"


def test_a_worker_that_cannot_reach_a_server_is_out_but_for_a_look_now_and_then() -> None:
    def absent(now: float) -> bool:
        return is_absent(now, 100.0, 30.0)

    assert not absent(129.9)
    assert absent(130.0) and absent(159.9)
    assert not absent(160.0) and not absent(164.9)
    assert absent(165.0) and not absent(195.0)


def test_a_worker_that_cannot_reach_a_server_is_lost_and_may_come_back() -> None:
    job = Driver(workers=2, servers=1)
    tasks = job.join_all()
    job.say(tasks["worker:1"], Heartbeat({UNREACHED: "ps:0"}))
    job.feed(Tick())
    assert job.workers == {0: 1}
    assert "it lives, and cannot reach ps:0" in job.reason
    job.say(tasks["worker:0"], Heartbeat({UNREACHED: "ps:0"}))
    job.feed(Tick())
    assert job.workers == {} and job.state.over is None, "the servers may be within reach again"
    job.join("worker:1", incarnation=1)
    assert job.workers == {1: 2}


@pytest.mark.parametrize("hangs_up", [None, 12.0], ids=["silent", "its connection breaks"])
def test_a_worker_that_was_late_when_its_cable_went_out_comes_back(hangs_up: float | None) -> None:
    stuck = Stuck(heartbeat_timeout=30.0)
    job, away = stuck.job, stuck.connections.pop("worker:1")
    for second in range(47):
        stuck.go(1)
        if second == hangs_up:
            job.hang_up(away)
    assert stuck.state == "lost"
    assert not any("it lives" in reason for reason in stuck.reasons)
    assert [type(each) for each in job.to(job.join("worker:1", incarnation=1))][:1] == [Joined]


def test_one_that_is_late_and_heard_before_its_connection_breaks_comes_back() -> None:
    stuck = Stuck()
    stuck.go(15, "worker:1")
    assert any("worker:1" in reason and "is stuck" in reason for reason in stuck.reasons)
    stuck.job.hang_up(stuck.connections.pop("worker:1"))
    stuck.go(5)
    assert stuck.state == "lost"
    back = stuck.job.join("worker:1", incarnation=1)
    assert [type(each) for each in stuck.job.to(back)][:1] == [Joined]

"""Signals to tasks: one worker leaves, or the job stops and is saved."""

from __future__ import annotations

import pytest

from tests.cluster.driver import Driver
from trireme.cluster.journal import resumed
from trireme.cluster.membership import Received, Stop
from trireme.cluster.messages import (
    Dismissed,
    Interrupted,
    JobOver,
    LastStepSaved,
    Left,
    Signalled,
    ViewChanged,
)
from trireme.cluster.scaling import DEPARTURE

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

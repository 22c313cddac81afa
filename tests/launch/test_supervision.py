"""Decisions of the launcher: events in, instructions out, time moved by hand."""

from __future__ import annotations

import pytest

from trireme.launch.outcome import Outcome, describe_status
from trireme.launch.supervision import (
    Kill,
    Limits,
    Phase,
    Restart,
    Say,
    Supervision,
    Terminate,
)

LIMITS = Limits(settle=2, give_up=1, stop=60, end=15, kill=10, echo=0.2)
KEEPERS = ("coordinator:0", "ps:0")


def supervise(workers: int = 2, limits: Limits = LIMITS, keepers=KEEPERS) -> Supervision:
    supervision = Supervision(limits)
    for name in (*keepers, *(f"worker:{index}" for index in range(workers))):
        supervision.started(name)
    return supervision


def raised(at: float = 0.0, kind: str = "exception", summary: str = "ValueError: boom") -> Outcome:
    return Outcome(kind=kind, summary=summary, at=at)


def end(supervision: Supervision, now: float, name: str, status: int, outcome=None):
    return supervision.exited(now, name, status, outcome or describe_status(status))


def orders(instructions):
    return [item for item in instructions if not isinstance(item, Say)]


def said(instructions) -> str:
    return "\n".join(item.text for item in instructions if isinstance(item, Say))


def test_finishes_when_the_last_task_has_ended() -> None:
    supervision = supervise()
    assert end(supervision, 1, "worker:0", 0) == []
    assert end(supervision, 2, "worker:1", 0) == []
    assert supervision.phase is Phase.ENDING
    assert end(supervision, 2, "ps:0", 0) == []
    assert supervision.phase is Phase.ENDING
    assert end(supervision, 3, "coordinator:0", 0) == []
    assert supervision.phase is Phase.DONE
    assert supervision.status == 0


def test_servers_that_do_not_end_with_the_job_are_terminated_then_killed() -> None:
    supervision = supervise(workers=1)
    end(supervision, 1, "worker:0", 0)
    assert supervision.tick(15.9) == []
    told = supervision.tick(16)
    assert orders(told) == [Terminate("coordinator:0"), Terminate("ps:0")]
    assert "did not end with the job" in said(told)
    end(supervision, 17, "coordinator:0", -15)
    assert orders(supervision.tick(26)) == [Kill("ps:0")]
    end(supervision, 26, "ps:0", -9)
    assert supervision.phase is Phase.DONE
    assert supervision.status == 0


def test_a_task_that_cannot_be_killed_is_given_up() -> None:
    supervision = supervise(workers=1, keepers=())
    supervision.interrupt(0)
    assert orders(supervision.tick(60)) == [Kill("worker:0")]
    assert "left to the kernel" in said(supervision.tick(70))
    assert supervision.phase is Phase.DONE
    assert supervision.status == 1


def test_a_worker_that_raises_ends_the_job() -> None:
    supervision = supervise()
    end(supervision, 5, "worker:1", 1, raised())
    assert supervision.phase is Phase.FAILING
    assert supervision.tick(6.9) == []
    assert supervision.tick(7) == [Terminate("worker:0")]
    assert end(supervision, 8, "worker:0", -15) == [Terminate("coordinator:0"), Terminate("ps:0")]
    for name in ("ps:0", "coordinator:0"):
        end(supervision, 8, name, -15)
    assert supervision.phase is Phase.DONE
    assert supervision.status == 1
    assert supervision.culprit is not None
    assert supervision.culprit.name == "worker:1"


def test_servers_have_a_moment_when_the_workers_of_a_failed_job_ended_by_themselves() -> None:
    supervision = supervise()
    end(supervision, 5, "worker:1", 1, raised())
    assert end(supervision, 5, "worker:0", 1, raised(kind="victim")) == []
    assert supervision.phase is Phase.ENDING
    assert end(supervision, 6, "ps:0", 1, raised(kind="victim")) == []
    assert orders(supervision.tick(6)) == [Terminate("coordinator:0")]


def test_a_failed_worker_that_is_slow_to_end_is_still_the_culprit() -> None:
    supervision = supervise()
    end(supervision, 5, "worker:0", 1, raised(at=2, kind="victim"))
    assert supervision.tick(7) == [Terminate("worker:1")]
    end(supervision, 8, "worker:1", -15, raised(at=1))  # it had told why before
    assert supervision.culprit is not None
    assert supervision.culprit.name == "worker:1"


def test_workers_that_hang_are_killed_with_all_others() -> None:
    supervision = supervise()
    end(supervision, 5, "worker:1", 1, raised())
    supervision.tick(7)
    assert supervision.tick(17) == [Kill("coordinator:0"), Kill("ps:0"), Kill("worker:0")]


def test_the_culprit_is_the_one_that_failed_first_by_itself() -> None:
    supervision = supervise(workers=4)
    end(supervision, 1, "worker:0", 1, raised(at=3, kind="victim"))
    end(supervision, 1, "worker:1", 1, raised(at=5))
    end(supervision, 1, "worker:2", 1, raised(at=4))
    end(supervision, 1, "worker:3", 1, raised(at=1, kind="victim"))
    assert supervision.culprit is not None
    assert supervision.culprit.name == "worker:2"


def test_bad_usage_in_a_worker_is_the_status_of_the_job() -> None:
    supervision = supervise(workers=1, keepers=(), limits=Limits(restarts=3))
    assert orders(end(supervision, 1, "worker:0", 2, raised(kind="usage"))) == []
    assert supervision.status == 2


def test_a_killed_worker_is_left_out_aloud() -> None:
    supervision = supervise()
    told = end(supervision, 1, "worker:1", -9)
    assert "worker:1 was killed by SIGKILL; the job goes on with the 1 left" in said(told)
    assert supervision.phase is Phase.RUNNING
    end(supervision, 9, "worker:0", 0)
    assert supervision.phase is Phase.ENDING
    assert supervision.status == 0


def test_the_job_fails_when_all_workers_were_killed() -> None:
    supervision = supervise()
    end(supervision, 1, "worker:0", -9, raised(at=1, kind="signal", summary="killed"))
    end(supervision, 2, "worker:1", -11, raised(at=2, kind="signal", summary="killed"))
    assert supervision.failed
    assert supervision.status == 1
    assert supervision.culprit is not None
    assert supervision.culprit.name == "worker:0"


def test_a_worker_killed_after_another_finished_fails_nothing() -> None:
    supervision = supervise()
    end(supervision, 1, "worker:0", 0)
    assert "had finished without it" in said(end(supervision, 2, "worker:1", -9))
    assert supervision.status == 0


@pytest.mark.parametrize(("status", "kind"), [(-9, "signal"), (1, "exception"), (3, "exit")])
def test_a_crashed_worker_is_started_again_so_many_times(status: int, kind: str) -> None:
    supervision = supervise(limits=Limits(restarts=2))
    outcome = raised(kind=kind, summary="why")
    first = end(supervision, 1, "worker:1", status, outcome)
    assert orders(first) == [Restart("worker:1", 1)]
    assert "worker:1 failed: why; started again (1 of 2)" in said(first)
    assert orders(end(supervision, 2, "worker:1", status, outcome)) == [Restart("worker:1", 0)]
    assert orders(end(supervision, 3, "worker:1", status, outcome)) == []
    assert supervision.failed is (status > 0)


def test_a_worker_started_again_too_late_fails_nothing() -> None:
    supervision = supervise(limits=Limits(restarts=1))
    end(supervision, 1, "worker:1", -9)
    end(supervision, 2, "worker:0", 0)
    late = end(supervision, 3, "worker:1", 1, raised(kind="victim", summary="the job is over"))
    assert "worker:1 was started again too late" in said(late)
    end(supervision, 3, "ps:0", 0)
    end(supervision, 3, "coordinator:0", 0)
    assert supervision.phase is Phase.DONE
    assert supervision.status == 0


def test_a_victim_is_not_started_again() -> None:
    supervision = supervise(limits=Limits(restarts=2))
    assert orders(end(supervision, 1, "worker:1", 1, raised(kind="victim"))) == []
    assert supervision.failed


@pytest.mark.parametrize("name", KEEPERS)
@pytest.mark.parametrize("status", [-9, 1])
def test_a_dead_server_or_coordinator_ends_the_job(name: str, status: int) -> None:
    supervision = supervise(limits=Limits(restarts=2))
    end(supervision, 1, name, status)
    assert supervision.phase is Phase.FAILING
    assert supervision.culprit is not None
    assert supervision.culprit.name == name


def test_a_server_that_dies_after_the_workers_have_finished_fails_nothing() -> None:
    supervision = supervise(workers=1)
    end(supervision, 1, "worker:0", 0)
    assert "WARNING: ps:0" in said(end(supervision, 2, "ps:0", -9))
    end(supervision, 3, "coordinator:0", 0)
    assert supervision.status == 0


def test_asked_once_the_workers_save_and_end() -> None:
    supervision = supervise()
    assert orders(supervision.interrupt(1)) == [Terminate("worker:0"), Terminate("worker:1")]
    end(supervision, 2, "worker:0", 130)
    end(supervision, 3, "worker:1", 130)
    assert supervision.phase is Phase.ENDING
    assert supervision.tick(17.9) == []
    end(supervision, 17, "ps:0", 0)
    end(supervision, 17, "coordinator:0", 0)
    assert supervision.status == 130


def test_workers_that_do_not_save_in_time_are_killed() -> None:
    supervision = supervise(workers=2)
    supervision.interrupt(1)
    end(supervision, 2, "worker:0", 130)
    late = supervision.tick(61)
    assert "worker:1 did not save and end within 60 s" in said(late)
    assert Kill("worker:1") in late
    end(supervision, 61, "worker:1", -9)
    assert supervision.phase is Phase.ENDING
    assert supervision.status == 1


def test_asked_twice_all_end_at_once() -> None:
    supervision = supervise(workers=1)
    supervision.interrupt(1)
    assert supervision.interrupt(1.1) == []  # an echo
    twice = supervision.interrupt(1.3)
    assert orders(twice) == [Kill("coordinator:0"), Kill("ps:0"), Kill("worker:0")]
    for name in ("coordinator:0", "ps:0", "worker:0"):
        end(supervision, 2, name, -9)
    assert supervision.phase is Phase.DONE
    assert supervision.status == 1


def test_a_job_interrupted_before_its_workers_were_started_ends_its_coordinator() -> None:
    supervision = supervise(workers=0, keepers=("coordinator:0",))
    told = supervision.interrupt(1)
    assert orders(told) == [Terminate("coordinator:0")]
    assert "did not end" not in said(told)
    end(supervision, 1, "coordinator:0", -15)
    assert supervision.phase is Phase.DONE
    assert supervision.status == 130


def test_an_exception_while_stopping_fails_the_job() -> None:
    supervision = supervise()
    supervision.interrupt(1)
    end(supervision, 2, "worker:0", 1, raised())
    assert supervision.tick(30) == []  # the other one still saves
    end(supervision, 31, "worker:1", 130)
    assert supervision.status == 1


def test_a_worker_interrupted_by_itself_interrupts_the_job() -> None:
    supervision = supervise(workers=1, keepers=())
    end(supervision, 1, "worker:0", 130)
    assert supervision.phase is Phase.DONE
    assert supervision.status == 130


def test_a_coordinator_that_ends_before_there_is_a_worker_fails_the_job() -> None:
    supervision = supervise(workers=0, keepers=("coordinator:0",))
    end(supervision, 1, "coordinator:0", 0)
    assert supervision.phase is Phase.DONE
    assert supervision.status == 1

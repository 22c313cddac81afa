"""Decisions of the launcher: events in, actions out, time moved by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.launch.supervised import LIMITS, SERVICES, commands, end, notices, raised, supervise
from trireme.launch.exit_reason import LEFT, ExitReason, describe_status
from trireme.launch.supervision import Supervision
from trireme.launch.supervision_state import (
    Kill,
    Phase,
    Start,
    StopJob,
    SupervisionLimits,
    Terminate,
)


def test_finishes_when_the_last_task_has_ended() -> None:
    supervision = supervise()
    assert end(supervision, 1, "worker:0", 0) == []
    assert end(supervision, 2, "worker:1", 0) == []
    assert supervision.phase is Phase.ENDING
    assert end(supervision, 2, "ps:0", 0) == []
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 0


def test_servers_that_do_not_end_with_the_job_are_terminated_then_killed() -> None:
    supervision = supervise(workers=1)
    end(supervision, 1, "worker:0", 0)
    assert supervision.tick(15.9) == []
    actions = supervision.tick(16)
    assert commands(actions) == [Terminate("ps:0")]
    assert "did not end with the job" in notices(actions)
    assert commands(supervision.tick(26)) == [Kill("ps:0")]
    end(supervision, 26, "ps:0", -9)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 0


def test_a_worker_that_runs_on_after_the_end_is_left_alone() -> None:
    supervision = supervise()
    supervision.job_over(3, "finished")
    end(supervision, 3, "worker:0", 0)
    assert supervision.tick(1000) == []


def test_a_task_that_cannot_be_killed_is_given_up() -> None:
    supervision = supervise(workers=1, services=())
    supervision.interrupt(0)
    assert commands(supervision.tick(60)) == [Kill("worker:0")]
    assert "left to the kernel" in notices(supervision.tick(70))
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 1


def test_a_worker_that_raises_ends_the_job() -> None:
    supervision = supervise()
    end(supervision, 5, "worker:1", 1, raised())
    assert supervision.phase is Phase.FAILING
    assert supervision.tick(6.9) == []
    assert supervision.tick(7) == [Terminate("worker:0")]
    assert end(supervision, 8, "worker:0", -15) == [Terminate("ps:0")]
    for name in ("ps:0",):
        end(supervision, 8, name, -15)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 1
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "worker:1"


def test_servers_have_a_moment_when_the_workers_of_a_failed_job_ended_by_themselves() -> None:
    supervision = supervise()
    end(supervision, 5, "worker:1", 1, raised())
    assert end(supervision, 5, "worker:0", 1, raised(kind="victim")) == []
    assert supervision.phase is Phase.ENDING
    assert commands(supervision.tick(5.9)) == []
    assert commands(supervision.tick(6)) == [Terminate("ps:0")]


def test_a_failed_worker_that_is_slow_to_end_is_still_the_culprit() -> None:
    supervision = supervise()
    end(supervision, 5, "worker:0", 1, raised(at=2, kind="victim"))
    assert supervision.tick(7) == [Terminate("worker:1")]
    end(supervision, 8, "worker:1", -15, raised(at=1))  # it had actions why before
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "worker:1"


def test_workers_that_hang_are_killed_with_all_others() -> None:
    supervision = supervise()
    end(supervision, 5, "worker:1", 1, raised())
    supervision.tick(7)
    assert supervision.tick(17) == [Kill("ps:0"), Kill("worker:0")]


def test_the_culprit_is_the_one_that_failed_first_by_itself() -> None:
    supervision = supervise(workers=4)
    end(supervision, 1, "worker:0", 1, raised(at=3, kind="victim"))
    end(supervision, 1, "worker:1", 1, raised(at=5))
    end(supervision, 1, "worker:2", 1, raised(at=4))
    end(supervision, 1, "worker:3", 1, raised(at=1, kind="victim"))
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "worker:2"


def test_bad_usage_in_a_worker_is_the_status_of_the_job() -> None:
    supervision = supervise(workers=1, services=(), limits=SupervisionLimits(restarts=3))
    assert commands(end(supervision, 1, "worker:0", 2, raised(kind="usage"))) == []
    assert supervision.verdict.status == 2


def test_a_killed_worker_is_left_out_aloud() -> None:
    supervision = supervise()
    actions = end(supervision, 1, "worker:1", -9)
    assert "worker:1 was killed by SIGKILL; the job goes on with the 1 left" in notices(actions)
    assert supervision.phase is Phase.RUNNING
    end(supervision, 9, "worker:0", 0)
    assert supervision.phase is Phase.ENDING
    assert supervision.verdict.status == 0


def test_the_job_fails_when_all_workers_were_killed() -> None:
    supervision = supervise()
    end(supervision, 1, "worker:0", -9, raised(at=1, kind="signal", summary="killed"))
    end(supervision, 2, "worker:1", -11, raised(at=2, kind="signal", summary="killed"))
    assert supervision.verdict.failed
    assert supervision.verdict.status == 1
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "worker:0"


def test_a_worker_killed_after_another_finished_fails_nothing() -> None:
    supervision = supervise()
    end(supervision, 1, "worker:0", 0)
    assert "the others had finished" in notices(end(supervision, 2, "worker:1", -9))
    assert supervision.verdict.status == 0


@pytest.mark.parametrize(("status", "kind"), [(-9, "signal"), (1, "exception"), (3, "exit")])
def test_a_crashed_worker_is_started_again_so_many_times(status: int, kind: str) -> None:
    supervision = supervise(limits=SupervisionLimits(restarts=2))
    reason = raised(kind=kind, summary="why")
    first = end(supervision, 1, "worker:1", status, reason)
    assert commands(first) == [Start("worker:1")]
    assert "worker:1 failed: why; started again (1 of 2)" in notices(first)
    assert commands(end(supervision, 2, "worker:1", status, reason)) == [Start("worker:1")]
    assert commands(end(supervision, 3, "worker:1", status, reason)) == []
    assert supervision.verdict.failed is (status > 0)


def left() -> ExitReason:
    """Why a worker ended that SIGTERM has asked to leave."""
    return describe_status(LEFT)


def test_a_worker_that_leaves_is_started_again_or_the_others_go_on() -> None:
    supervision = supervise(limits=SupervisionLimits(restarts=1))
    first = end(supervision, 1, "worker:1", LEFT, left())
    assert commands(first) == [Start("worker:1")]
    assert "worker:1 left: SIGTERM has asked it to; started again (1 of 1)" in notices(first)
    second = end(supervision, 2, "worker:1", LEFT, left())
    assert commands(second) == []
    assert "worker:1 left: SIGTERM has asked it to; the job goes on with the 1 left" in notices(
        second
    )
    end(supervision, 3, "worker:0", 0)
    finish(supervision, 3)
    assert supervision.verdict.status == 0


def test_a_worker_that_leaves_when_all_are_asked_to_stop_has_not_failed() -> None:
    supervision = supervise()
    supervision.interrupt(1)
    end(supervision, 2, "worker:1", LEFT, left())
    end(supervision, 3, "worker:0", 130)
    end(supervision, 3, "ps:0", 0)
    supervision.job_over(3, "interrupted")
    assert (supervision.verdict.status, supervision.verdict.failed) == (130, False)


def test_a_worker_started_again_too_late_fails_nothing() -> None:
    supervision = supervise(limits=SupervisionLimits(restarts=1))
    end(supervision, 1, "worker:1", -9)
    end(supervision, 2, "worker:0", 0)
    late = end(supervision, 3, "worker:1", 1, raised(kind="victim", summary="the job is over"))
    assert "worker:1 came too late: the others had finished" in notices(late)
    end(supervision, 3, "ps:0", 0)
    supervision.job_over(3, "finished")
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 0


def test_a_victim_is_not_started_again() -> None:
    supervision = supervise(limits=SupervisionLimits(restarts=2))
    assert commands(end(supervision, 1, "worker:1", 1, raised(kind="victim"))) == []
    assert supervision.verdict.failed


@pytest.mark.parametrize("status", [-9, 1])
def test_a_dead_server_ends_the_job(status: int) -> None:
    supervision = supervise()
    end(supervision, 1, "ps:0", status)
    assert supervision.phase is Phase.FAILING
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "ps:0"


def test_a_server_that_dies_after_the_workers_have_finished_fails_nothing() -> None:
    supervision = supervise(workers=1)
    end(supervision, 1, "worker:0", 0)
    assert "WARNING: ps:0" in notices(end(supervision, 2, "ps:0", -9))
    supervision.job_over(3, "finished")
    assert supervision.verdict.status == 0


def test_asked_once_the_workers_save_and_end() -> None:
    supervision = supervise()
    told = [Terminate("worker:0"), Terminate("worker:1")]
    assert commands(supervision.interrupt(1)) == [StopJob(), *told]
    end(supervision, 2, "worker:0", 130)
    end(supervision, 3, "worker:1", 130)
    assert supervision.phase is Phase.ENDING
    assert supervision.tick(17.9) == []
    end(supervision, 17, "ps:0", 0)
    supervision.job_over(17, "finished")
    assert supervision.verdict.status == 130


def test_asked_when_the_last_step_was_made_the_job_has_finished() -> None:
    supervision = supervise()
    supervision.interrupt(1)
    for name in ("worker:0", "worker:1", "ps:0"):
        end(supervision, 2, name, 0)
    assert (supervision.verdict.status, supervision.verdict.interrupted) == (0, False)


@pytest.mark.parametrize("last", ["worker:0", "worker:1"])
def test_what_the_coordinator_knows_to_have_finished_has(last: str) -> None:
    """A worker had said that it finished, and was killed before its process had ended."""
    supervision = supervise(limits=replace(LIMITS, restarts=1))
    end(supervision, 1, "worker:1", -9)  # it is started again, and finds no job
    end(supervision, 1, "worker:0", -9)
    end(supervision, 2, "ps:0", 0)
    supervision.job_over(2, "finished")
    for name in sorted(("worker:0", "worker:1"), key=lambda name: name == last):
        late = ExitReason(kind="victim", summary="it could not reach the coordinator", at=3.0)
        supervision.exited(3, name, 1, late) if name == "worker:1" else end(
            supervision, 3, name, -9
        )
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 0


def test_a_job_whose_workers_are_lost_while_it_stops_has_saved_nothing() -> None:
    supervision = supervise()
    supervision.membership_reported(0.0, True, {})
    supervision.interrupt(1)
    assert "worker:0 was killed by SIGKILL" in notices(end(supervision, 2, "worker:0", -9))
    assert "no worker is left" in notices(end(supervision, 2, "worker:1", -9))
    for name in ("ps:0",):
        end(supervision, 3, name, -15)
    assert (supervision.verdict.status, supervision.verdict.failed) == (1, False)
    assert supervision.verdict.unsaved == ["worker:0", "worker:1"]


def test_workers_that_do_not_save_in_time_are_killed() -> None:
    supervision = supervise(workers=2)
    supervision.interrupt(1)
    end(supervision, 2, "worker:0", 130)
    late = supervision.tick(61)
    assert "worker:1 did not save and end within 60 s" in notices(late)
    assert Kill("worker:1") in late
    end(supervision, 61, "worker:1", -9)
    assert supervision.phase is Phase.ENDING
    assert supervision.verdict.status == 1


def test_who_hangs_while_the_others_save_does_not_undo_that() -> None:
    supervision = supervise()
    supervision.interrupt(1)
    end(supervision, 2, "worker:0", 130)
    finish(supervision, 3)  # to the coordinator the job is over: worker:1 had not come yet
    late = supervision.tick(61)
    assert "worker:1 did not end within 60 s: killed" in notices(late)
    end(supervision, 61, "worker:1", -9)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 130


def test_a_worker_that_somebody_kills_while_it_saves_is_lost() -> None:
    supervision = supervise()
    supervision.interrupt(1)
    assert "worker:1 was killed by SIGKILL" in notices(end(supervision, 2, "worker:1", -9))
    end(supervision, 3, "worker:0", 130)
    assert supervision.verdict.status == 130


def test_a_job_whose_workers_were_all_being_started_again_did_not_save() -> None:
    supervision = supervise(limits=SupervisionLimits(restarts=5))
    supervision.membership_reported(1, True, {})
    end(supervision, 2, "worker:0", -9)
    end(supervision, 3, "worker:1", -9)
    told = [Terminate("worker:0"), Terminate("worker:1")]
    assert commands(supervision.interrupt(4)) == [StopJob(), *told]
    end(supervision, 5, "worker:0", -15)  # they had not come so far as to save when they were told
    end(supervision, 5, "worker:1", -15)
    finish(supervision, 6)
    assert supervision.verdict.unsaved == ["worker:0", "worker:1"]
    assert supervision.verdict.status == 1


def test_asked_twice_all_end_at_once() -> None:
    supervision = supervise(workers=1)
    supervision.interrupt(1)
    assert supervision.interrupt(1.1) == []  # an echo
    twice = supervision.interrupt(1.3)
    assert commands(twice) == [Kill("ps:0"), Kill("worker:0")]
    for name in ("ps:0", "worker:0"):
        end(supervision, 2, name, -9)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 1


def test_an_exception_while_stopping_fails_the_job() -> None:
    supervision = supervise()
    supervision.interrupt(1)
    end(supervision, 2, "worker:0", 1, raised())
    assert supervision.tick(30) == []  # the other one still saves
    end(supervision, 31, "worker:1", 130)
    assert supervision.verdict.status == 1


def test_a_worker_interrupted_by_itself_interrupts_the_job() -> None:
    supervision = supervise(workers=1, services=())
    end(supervision, 1, "worker:0", 130)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 130


# A task that hangs -------------------------------------------------------------------------------


def hung(at: float = 0.0) -> ExitReason:
    return raised(at=at, kind="hung", summary="given up and killed: it sent nothing for 10.0 s")


def given_up(supervision: Supervision, now: float, *names: str):
    return supervision.membership_reported(now, True, {name: hung(now) for name in names})


def finish(supervision: Supervision, now: float) -> None:
    supervision.job_over(now, "finished")
    for name in SERVICES:
        end(supervision, now, name, 0)


def test_a_worker_that_the_coordinator_has_given_up_is_killed_and_left_out() -> None:
    supervision = supervise()
    assert given_up(supervision, 10, "worker:1") == []
    assert supervision.deadline == 12
    assert supervision.tick(11.9) == []
    assert supervision.tick(12) == [Kill("worker:1")]
    actions = notices(end(supervision, 12, "worker:1", -9))
    assert "worker:1 was given up and killed: it sent nothing for 10.0 s" in actions
    assert "the job goes on with the 1 left" in actions
    end(supervision, 20, "worker:0", 0)
    finish(supervision, 21)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 0


def test_a_worker_that_comes_back_by_itself_is_spared() -> None:
    supervision = supervise()
    given_up(supervision, 10, "worker:1")
    given_up(supervision, 11)
    assert supervision.deadline is None
    assert supervision.tick(60) == []


def test_a_hung_worker_is_started_again_where_that_is_allowed() -> None:
    supervision = supervise(limits=SupervisionLimits(restarts=1, settle=2))
    given_up(supervision, 10, "worker:1")
    supervision.tick(12)
    assert commands(end(supervision, 12, "worker:1", -9)) == [Start("worker:1")]
    assert given_up(supervision, 13) == []
    given_up(supervision, 14, "worker:1")
    assert supervision.tick(16) == [Kill("worker:1")]
    assert commands(end(supervision, 16, "worker:1", -9)) == []
    assert not supervision.verdict.failed


def test_a_worker_that_was_given_up_and_fails_by_that_does_not_fail_the_job() -> None:
    supervision = supervise()
    given_up(supervision, 10, "worker:1")
    over = raised(kind="victim", summary="the job is over, finished")
    assert "goes on with the 1 left" in notices(end(supervision, 11, "worker:1", 1, over))
    end(supervision, 12, "worker:0", 0)
    finish(supervision, 13)
    assert supervision.verdict.status == 0


def test_who_hears_that_the_job_has_finished_does_not_fail_it() -> None:
    supervision = supervise()
    end(supervision, 1, "worker:0", 0)
    finish(supervision, 2)
    late = end(supervision, 3, "worker:1", 1, raised(kind="victim"))
    assert "worker:1 came too late" in notices(late)
    assert supervision.verdict.status == 0


def test_an_exception_of_a_worker_that_was_given_up_is_its_own() -> None:
    supervision = supervise()
    given_up(supervision, 10, "worker:1")
    supervision.tick(12)
    end(supervision, 12, "worker:1", 1, raised())
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.reason.summary == "ValueError: boom"


def test_what_the_kernel_cannot_kill_is_not_waited_for() -> None:
    supervision = supervise()
    given_up(supervision, 10, "worker:1")
    supervision.tick(12)
    assert "worker:1 cannot be killed: left to the kernel" in notices(supervision.tick(22))
    end(supervision, 23, "worker:0", 0)
    finish(supervision, 24)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 0
    assert end(supervision, 25, "worker:1", -9) == []


def test_a_chief_that_is_lost_at_the_end_fails_the_job_if_the_coordinator_says_so() -> None:
    supervision = supervise()
    end(supervision, 1, "worker:1", 0)
    assert "the others had finished" in notices(end(supervision, 2, "worker:0", -9))
    assert supervision.job_over(4, "failed") == []
    end(supervision, 4, "ps:0", 1, raised(kind="victim", summary="worker:0 was lost"))
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 1
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "worker:0"


def test_a_chief_that_the_coordinator_awaits_in_vain_fails_the_job() -> None:
    supervision = supervise()
    end(supervision, 1, "worker:1", 0)
    end(supervision, 2, "worker:0", -9)
    actions = supervision.tick(17)
    assert commands(actions) == [Terminate("ps:0")]
    for name in SERVICES:
        end(supervision, 18, name, -15)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 1


def test_a_job_in_which_nobody_took_part_has_not_finished() -> None:
    supervision = supervise()
    supervision.membership_reported(1, False, {})
    end(supervision, 2, "worker:0", 0)
    end(supervision, 2, "worker:1", 0)
    assert commands(supervision.tick(3)) == [Terminate("ps:0")]
    assert supervision.job_over(3.5, "interrupted") == [], "it is the server's word"
    for name in SERVICES:
        end(supervision, 4, name, -15)
    assert supervision.verdict.status == 2
    assert supervision.verdict.culprit is not None
    assert "no worker had joined the job" in supervision.verdict.culprit.reason.summary


# The whole job again -----------------------------------------------------------------------------

AGAIN = SupervisionLimits(restarts=1, settle=2, give_up=1, kill=10, save=30)


def begin_all(supervision: Supervision, workers: int = 2) -> None:
    for name in (*SERVICES, *(f"worker:{index}" for index in range(workers))):
        supervision.started(name)


def test_when_a_server_dies_the_whole_job_is_started_again() -> None:
    supervision = supervise(limits=AGAIN)
    first = end(supervision, 1, "ps:0", -9)
    assert commands(first) == []  # the coordinator tells the others, and they may save
    assert "ps:0 was killed by SIGKILL; the whole job is started again, from its newest" in notices(
        first
    )
    assert "(1 of 1)" in notices(first)
    assert supervision.job_over(2, "failed") == []
    for name in ("worker:0", "worker:1"):
        assert end(supervision, 3, name, 1, raised(kind="victim")) == []
    assert supervision.phase is Phase.STARTING
    begin_all(supervision)
    end(supervision, 9, "worker:0", 0)
    end(supervision, 9, "worker:1", 0)
    finish(supervision, 10)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 0


def test_what_is_lost_is_said_once_before_the_restart() -> None:
    supervision = supervise(limits=AGAIN)
    end(supervision, 1, "ps:0", -9)
    for worker in (1, 0):
        victim = ExitReason(
            kind="victim", summary="ps:0 was lost", at=2.0, loss=f"{5 + worker} steps are lost"
        )
        last = end(supervision, 2, f"worker:{worker}", 1, victim)
    assert notices(last) == "5 steps are lost"  # the chief's count
    assert supervision.phase is Phase.STARTING


def test_the_whole_job_is_started_again_so_many_times() -> None:
    supervision = supervise(workers=1, limits=AGAIN)
    end(supervision, 1, "ps:0", -9)
    assert commands(end(supervision, 2, "worker:0", 1, raised(kind="victim"))) == []
    assert supervision.phase is Phase.STARTING
    assert supervision.restarts_left("ps:0") == 0
    assert supervision.restarts_left("worker:0") == 1
    begin_all(supervision, workers=1)
    end(supervision, 5, "ps:0", -9)
    assert supervision.phase is Phase.FAILING


def test_a_server_whose_victims_end_first_starts_the_job_again_too() -> None:
    supervision = supervise(limits=AGAIN)
    end(supervision, 1, "worker:0", 1, raised(kind="victim"))
    assert supervision.verdict.failed
    given_up(supervision, 1.1, "ps:0")
    assert supervision.verdict.failures  # it is killed at once
    actions = end(supervision, 1.2, "ps:0", -9)
    assert "ps:0 was given up and killed" in notices(actions)
    assert not supervision.verdict.failed
    assert end(supervision, 2, "worker:1", 1, raised(kind="victim")) == []
    assert supervision.phase is Phase.STARTING


@pytest.mark.parametrize("kind", ["usage", "victim", "corrupted"])
def test_what_would_fail_again_is_not_started_again(kind: str) -> None:
    supervision = supervise(limits=AGAIN)
    end(supervision, 1, "ps:0", 1, raised(kind=kind))
    assert supervision.phase is Phase.FAILING


@pytest.mark.parametrize("together", [False, True])
def test_a_worker_of_corrupted_values_is_not_started_again(together: bool) -> None:
    supervision = supervise(limits=replace(AGAIN, together=together))
    assert commands(end(supervision, 1, "worker:1", 1, raised(kind="corrupted"))) == []
    assert supervision.phase is Phase.FAILING and supervision.verdict.status == 1


def test_a_server_that_dies_of_a_workers_exception_starts_nothing_again() -> None:
    supervision = supervise(limits=AGAIN)
    end(supervision, 1, "worker:1", 1, raised())
    end(supervision, 1, "worker:1", 1, raised())
    supervision.started("worker:1")
    end(supervision, 2, "worker:1", 1, raised(kind="usage"))
    end(supervision, 3, "ps:0", 1, raised(kind="error"))
    assert supervision.phase is Phase.FAILING


def test_who_does_not_end_for_the_restart_is_killed() -> None:
    supervision = supervise(limits=AGAIN)
    end(supervision, 1, "ps:0", -9)
    assert supervision.tick(30.9) == []
    late = supervision.tick(31)
    assert commands(late) == [Kill("worker:0"), Kill("worker:1")]
    assert "worker:0, worker:1 did not end for the restart: killed" in notices(late)
    end(supervision, 31, "worker:0", -9)
    assert "nothing is started again" in notices(supervision.tick(41))
    supervision.tick(43)
    supervision.tick(53)
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.status == 1


def test_a_request_to_stop_before_the_restart_interrupts_the_job() -> None:
    supervision = supervise(limits=AGAIN)
    supervision.membership_reported(0, True, {})
    end(supervision, 1, "ps:0", -9)
    actions = supervision.interrupt(2)
    assert "ends instead" in notices(actions)
    assert commands(actions) == [], "the workers may be saving what they hold"
    for name in ("worker:0", "worker:1"):
        assert commands(end(supervision, 3, name, 1, raised(kind="victim"))) == []
    assert supervision.phase is Phase.DONE
    assert supervision.verdict.state == "interrupted"
    assert supervision.verdict.status == 1, "nobody has saved"


def test_workers_that_save_before_the_restart_that_is_not_to_be_have_saved() -> None:
    supervision = supervise(limits=replace(AGAIN, together=True), services=())
    end(supervision, 1, "worker:0", -9)
    supervision.interrupt(2)
    end(supervision, 3, "worker:1", 130)
    assert supervision.phase is Phase.DONE
    assert (supervision.verdict.state, supervision.verdict.status) == ("interrupted", 130)


LOST = {"worker:0": ExitReason(kind="hung", summary="its connection closed")}


def test_a_worker_that_exits_with_status_0_and_never_left_is_lost() -> None:
    supervision = supervise()
    supervision.membership_reported(0, True, {})
    end(supervision, 1, "worker:0", 0)
    said = notices(supervision.membership_reported(3, True, LOST))
    assert "worker:0 ended with status 0 in the middle of training, and has not left" in said
    assert "the job goes on with the 1 left" in said
    assert not supervision.membership_reported(4, True, LOST)
    end(supervision, 5, "worker:1", 0)
    end(supervision, 5, "ps:0", 0)
    assert supervision.verdict.status == 0
    assert [each.name for each in supervision.verdict.lost] == ["worker:0"]


def test_it_is_started_again_where_restarts_are_allowed() -> None:
    supervision = supervise(limits=AGAIN)
    end(supervision, 1, "worker:0", 0)
    assert commands(supervision.membership_reported(3, True, LOST)) == [Start("worker:0")]


def test_a_job_whose_only_worker_does_that_has_failed_by_it() -> None:
    supervision = supervise(workers=1)
    end(supervision, 1, "worker:0", 0)
    assert "worker:0 ended with status 0" in notices(supervision.membership_reported(3, True, LOST))
    end(supervision, 3, "ps:0", 1, raised(at=3, kind="victim"))
    assert supervision.verdict.status == 1
    assert supervision.verdict.culprit is not None
    assert supervision.verdict.culprit.name == "worker:0"


def test_a_worker_that_has_left_is_not_lost_after_the_end() -> None:
    supervision = supervise()
    supervision.job_over(1, "finished")
    end(supervision, 1, "worker:0", 0)
    assert not supervision.membership_reported(3, True, LOST)


def lost_worker(now: float = 1.0, **formed: bool) -> tuple[Supervision, str]:
    """Worker 0 was killed; what the launcher said of it."""
    supervision = supervise()
    supervision.membership_reported(0.0, True, {}, **formed)
    return supervision, notices(end(supervision, now, "worker:0", -9))


def test_a_job_that_has_not_begun_cannot_go_on_without_a_worker() -> None:
    supervision, actions = lost_worker(formed=False)
    assert actions == ""
    assert supervision.tick(2.9) == []
    assert Terminate("worker:1") in supervision.tick(3)
    for name in ("worker:1", "ps:0"):
        end(supervision, 4, name, -15)
    assert supervision.verdict.status == 1
    assert (
        supervision.verdict.culprit is not None and supervision.verdict.culprit.name == "worker:0"
    )


def test_a_job_that_has_begun_goes_on_without_a_worker() -> None:
    supervision, actions = lost_worker(formed=True)
    assert "the job goes on with the 1 left" in actions
    assert supervision.tick(100) == []


def test_a_program_that_ends_before_the_job_has_begun_fails_it() -> None:
    supervision = supervise()
    supervision.membership_reported(0.0, True, {}, formed=False)
    end(supervision, 1, "worker:0", 0)
    assert Terminate("worker:1") in supervision.tick(3)
    end(supervision, 4, "worker:1", -15)
    assert supervision.verdict.status == 2
    assert supervision.verdict.culprit is not None
    assert "before the job had begun" in supervision.verdict.culprit.reason.summary


def test_who_is_killed_with_all_others_is_not_called_unkillable() -> None:
    supervision = supervise(workers=1)
    supervision.membership_reported(0.0, True, {"worker:0": hung()})
    supervision.interrupt(1)
    supervision.interrupt(1.9)
    assert "cannot be killed" not in notices(supervision.tick(2.1))

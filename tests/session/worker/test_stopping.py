"""What a worker says whose job goes back."""

from __future__ import annotations

from trireme.session.worker.stopping import rolled_back

MORE = "; more --replicas make such a loss less likely"


def test_a_worker_says_how_far_its_job_goes_back() -> None:
    assert str(rolled_back(12, 5)) == (
        "all copies of a part of the parameters were lost: the job goes back from step 12 to step "
        f"5, and what was learned since is lost{MORE}"
    )


def test_a_worker_whose_loop_has_ended_must_be_started_again() -> None:
    error = rolled_back(12, 5, ended="worker:1")
    assert error.step == 5 and str(error).endswith(
        ". worker:1 had ended its training, and must be started again to make those steps"
    )

"""A bit changes in a job: it is found in time, the right task is named, and healed as it was."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.corruption.flips import SAVED, STEPS, Flip, run
from tests.corruption.soak import problem
from trireme.errors import CorruptedValues
from trireme.session.checkpoint import latest

FLIPS = [
    Flip("worker", 1, 4),
    Flip("worker", 0, 5, where=0.21, bit=7, computing=True),
    Flip("server", 0, 3),
    Flip("server", 1, 6, where=0.9, bit=0),
    Flip("backup", 1, 3, where=0.1),
    Flip("push", 0, 5),
    Flip("values", 1, 4),
    Flip("checkpoint", 0, SAVED),
]


@cache
def quiet() -> frozenset[str]:
    outcome = run(None)
    assert not outcome.told and not outcome.failure
    return frozenset(outcome.digests)


@pytest.mark.parametrize("flip", FLIPS, ids=lambda flip: flip.place)
def test_a_healed_job_ends_as_if_no_bit_had_changed(flip: Flip, tmp_path: Path) -> None:
    run_dir = tmp_path if flip.place == "checkpoint" else None
    outcome = run(flip, run_dir=run_dir)
    assert problem(flip, 2, outcome, set(quiet())) == ""
    assert len(outcome.told) == 1


@pytest.mark.parametrize("flip", FLIPS, ids=lambda flip: flip.place)
def test_a_warned_job_goes_on(flip: Flip, tmp_path: Path) -> None:
    outcome = run(flip, "warn", run_dir=tmp_path if flip.place == "checkpoint" else None)
    # A bit that changes what a loss is may end it: then the error says why.
    if outcome.ran is not None and not outcome.ran.raised:
        assert outcome.flipped and outcome.told
    assert outcome.told, outcome.failure


@pytest.mark.parametrize("flip", [FLIPS[0], FLIPS[6]], ids=lambda flip: flip.place)
def test_a_worker_stops_the_job(flip: Flip) -> None:
    outcome = run(flip, "stop", servers=1, replicas=1)
    assert outcome.ran is not None
    assert isinstance(outcome.ran.raised[flip.task], CorruptedValues)
    assert outcome.ran.over is not None and outcome.ran.over.outcome == "failed"
    assert outcome.ran.over.culprit == f"worker:{flip.task}"


@pytest.mark.parametrize("flip", [FLIPS[2], FLIPS[4], FLIPS[5]], ids=lambda flip: flip.place)
def test_a_server_stops_the_job_though_others_hold_copies(flip: Flip) -> None:
    outcome = run(flip, "stop")
    assert f"ps:{flip.task}: CorruptedValues: corrupted values" in outcome.failure


@pytest.mark.parametrize("scheme", ["memory", "tcp", "shm"])
@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("sync", {}),
        ("async", {}),
        ("async", {"prefetch": True}),
        ("ssp", {"staleness": 1}),
        ("sync", {"compress": "fp16"}),
    ],
    ids=str,
)
def test_nothing_is_found_in_a_quiet_job(strategy: str, more: dict[str, Any], scheme: str) -> None:
    outcome = run(None, strategy=strategy, scheme=scheme, every=1, **more)
    assert outcome.told == [] and outcome.failure == "" and outcome.digests


@pytest.mark.parametrize("strategy", ["averaging", "diloco"])
def test_nothing_is_found_where_workers_train_locally(strategy: str) -> None:
    outcome = run(None, strategy=strategy, every=1, local_steps=3)
    assert outcome.told == [] and outcome.failure == "" and outcome.digests


def test_what_a_program_writes_itself_is_no_corruption() -> None:
    outcome = run(None, every=1, writes=True)
    assert outcome.told == [] and outcome.failure == "" and outcome.digests


def test_the_checkpoint_that_was_spoilt_is_whole_on_the_disk(tmp_path: Path) -> None:
    run(None, run_dir=tmp_path / "quiet")
    run(FLIPS[-1], run_dir=tmp_path / "spoilt")
    found = [latest(tmp_path / name, lambda path, why: None) for name in ("quiet", "spoilt")]
    assert found[0] is not None and found[1] is not None
    assert found[0].step == found[1].step == STEPS
    for name, tensor in found[0].model.items():
        assert tensor.equal(found[1].model[name])


def test_copies_are_compared_at_checks_though_nothing_is_looked_at_between_them() -> None:
    """With three copies the minority is filled again; the job ends as if nothing had happened."""
    flip = Flip("backup", 2, 3, where=0.1)
    outcome = run(flip, every=4, share=-1.0, servers=3, replicas=3)
    assert problem(flip, 4, outcome, set(quiet())) == "", outcome.told
    assert "ps:2 has other values of shard " in outcome.told[0][1]


def test_a_primary_in_the_minority_leaves_and_the_job_goes_on_with_a_backup() -> None:
    outcome = run(Flip("server", 1, 3, where=0.1), every=4, share=-1.0, servers=3, replicas=3)
    assert "ps:1 has other values of shard 1 than ps:" in outcome.told[0][1]
    assert outcome.failure.startswith("ps:1: CorruptedValues: ps:1 has a corrupted shard 1")
    assert len(outcome.digests) == 1, "both workers have come to the end"


@pytest.mark.parametrize("flip", FLIPS[:-1], ids=lambda flip: flip.place)
def test_asynchronous_workers_are_checked_too(flip: Flip) -> None:
    outcome = run(flip, strategy="async")
    assert outcome.flipped and outcome.failure == ""
    assert len(outcome.told) == 1 and flip.named in outcome.told[0][1]
    # A worker that finds it may do so after any number of steps of the other.
    if flip.place not in ("worker", "values"):
        assert outcome.told[0][0] - flip.step <= 4, "two workers make steps in turn"


def test_a_loss_that_is_not_finite_is_computed_again_from_values_that_are_put_back() -> None:
    flip = Flip("worker", 1, 4, where=227.5 / 332, bit=6)  # the exponent of a weight
    outcome = run(flip)
    assert problem(flip, 2, outcome, set(quiet())) == ""
    outcome = run(flip, "warn")
    assert "bit 30 of element 0 of '2.weight'" in outcome.told[0][1]


def test_two_copies_that_differ_end_the_job_where_nothing_says_which_is_right() -> None:
    flip = Flip("backup", 1, 3, where=0.1)
    outcome = run(flip, every=4, share=-1.0)
    assert "nothing says who is right" in outcome.failure
    outcome = run(flip, "warn", every=4, share=-1.0)
    assert len(outcome.told) == 1, "it is said once"
    assert " have different values of shard " in outcome.told[0][1]

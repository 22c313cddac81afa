"""At whichever operation a save fails or dies, each checkpoint is the old one or the new one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.session.checkpoint.disk import (
    DIED,
    Disk,
    hidden,
    in_a_child,
    input_output_error,
    killed,
    no_room,
    operations_of,
    power_cut,
    read_only,
)
from tests.session.checkpoint.samples import assert_same, sample, sample_tables
from trireme.errors import CheckpointError
from trireme.session.checkpoint import (
    CheckpointData,
    latest,
    list_checkpoints,
    load,
    prune,
    save,
    step_of,
)

SHARD_BYTES = 24
"""So that the groups of the sample are of several files each."""

ANEW = replace(sample(2), model=sample(9).model, state={"again": True})
"""Another checkpoint of step 2, which the next writer saves."""

SCENARIOS = {"the next step": sample(3), "the same step by the next writer": ANEW}

SETTING = (sample(1), replace(sample(2), tables=sample_tables({1: 1.0, 2: 2.0}, waiting={5: 1})))


def written(run: Path) -> None:
    for data in SETTING:
        save(run, data, writer=1, shard_bytes=SHARD_BYTES)


def save_and_prune(run: Path, data: CheckpointData) -> None:
    """Does what a job does when a checkpoint is due."""
    path = save(run, data, writer=2, shard_bytes=SHARD_BYTES)
    prune(run, 2, spared=[path])


def no_complaint(path: Path, reason: CheckpointError) -> None:
    raise AssertionError(f"{path} is damaged: {reason}")


def assert_old_or_new(run: Path, data: CheckpointData) -> bool:
    """Checks every checkpoint; returns whether the new one is there."""
    expected = {each.step: [each] for each in SETTING}
    expected.setdefault(data.step, []).append(data)
    there = False
    for path in list_checkpoints(run):
        found = load(path)
        (same,) = [each for each in expected[step_of(path)] if each.state == found.state]
        assert_same(found, same)
        there |= same is data
    newest = latest(run, no_complaint)
    assert newest is not None
    assert newest.step == (data.step if there else 2)
    assert len(list_checkpoints(run)) >= 2
    return there


def assert_tidy_after_the_next(run: Path) -> None:
    save_and_prune(run, sample(4))
    assert_same(load(list_checkpoints(run)[-1]), sample(4))
    assert [step_of(path) for path in list_checkpoints(run)][-1] == 4
    assert len(list_checkpoints(run)) == 2
    assert not hidden(run)


def points(tmp_path: Path, data: CheckpointData) -> int:
    written(tmp_path / "count")
    operations = operations_of(partial(save_and_prune, tmp_path / "count", data))
    assert {"open to write", "write", "mkdir", "fsync", "rename", "replace", "unlink", "rmdir"} == {
        *operations
    }
    return len(operations)


def each_point(tmp_path: Path, count: int) -> list[tuple[int, Path]]:
    """Returns each point with a run directory in which the old checkpoints are."""
    written(tmp_path / "old")
    return [
        (at, Path(shutil.copytree(tmp_path / "old", tmp_path / str(at))))
        for at in range(1, count + 1)
    ]


@pytest.mark.thorough
@pytest.mark.slow(but=("the next step-power_cut",))
@pytest.mark.parametrize("death", [killed, power_cut])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_process_that_dies_at_any_operation(
    tmp_path: Path, scenario: str, death: Callable[[Disk, str], None]
) -> None:
    data = SCENARIOS[scenario]

    def die(run: Path, at: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, at, death)
            save_and_prune(run, data)

    count = points(tmp_path, data)
    outcomes = set()
    for at, run in each_point(tmp_path, count):
        assert in_a_child(partial(die, run, at)) == DIED
        outcomes.add(assert_old_or_new(run, data))
        assert_tidy_after_the_next(run)
    assert count > 60
    assert outcomes == {True, False}


@pytest.mark.slow(
    but=(
        "the next step-from then on-no_room",
        "the same step by the next writer-once-input_output_error",
        "the same step by the next writer-from then on-read_only",
        "the next step-from then on-input_output_error",
    )
)
@pytest.mark.thorough(but=("the next step-from then on-no_room",))
@pytest.mark.parametrize("failure", [no_room, input_output_error, read_only])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_disk_that_fails_at_any_operation(
    tmp_path: Path, scenario: str, lasting: bool, failure: Callable[[Disk, str], None]
) -> None:
    data, reported = SCENARIOS[scenario], 0
    for at, run in each_point(tmp_path, points(tmp_path, data)):
        said = ""
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, at, failure, lasting=lasting)
            try:
                save_and_prune(run, data)
            except CheckpointError as error:
                said = str(error)
        there = assert_old_or_new(run, data)
        assert said or there, "a save that is not there was not reported"
        reported += bool(said)
        assert_tidy_after_the_next(run)
    assert reported > 35

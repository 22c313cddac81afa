from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError, ConfigurationError
from trireme.session.checkpoint import (
    CheckpointData,
    Saver,
    Schedule,
    list_checkpoints,
    load,
    save,
    step_of,
)
from trireme.session.options import Checkpoint

SOON = 20.0  # a deadline that only a hang reaches


class HeldDisk:
    """A disk that begins to write when told to."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Semaphore(0)
        self.written: list[int] = []
        self.failures: list[Exception] = []

    def __call__(self, run_dir: Path, data: CheckpointData) -> Path:
        self.begun.release()
        assert self.let_go.acquire(timeout=SOON)
        if self.failures:
            raise self.failures.pop()
        self.written.append(data.step)
        return save(run_dir, data)


def test_saving_writes_and_prunes(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Checkpoint(keep=2))
    for step in (1, 2, 3):
        saver.submit(sample(step))
        saver.wait(SOON)
    assert [step_of(path) for path in saver.saved()] == [1, 2, 3]
    assert saver.saved() == []
    saver.close(SOON)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 3]
    assert_same(load(list_checkpoints(tmp_path)[-1]), sample(3))


def test_submit_does_not_wait_and_the_newest_request_wins(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = Saver(tmp_path, Checkpoint(), disk)
    saver.submit(sample(1))
    assert disk.begun.acquire(timeout=SOON)
    for step in (2, 3, 4):
        saver.submit(sample(step))
    disk.let_go.release(2)
    saver.close(SOON)
    assert disk.written == [1, 4]


def test_wait_keeps_to_its_deadline_and_names_the_step(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = Saver(tmp_path, Checkpoint(), disk)
    saver.submit(sample(5))
    assert disk.begun.acquire(timeout=SOON)
    with pytest.raises(CheckpointError, match=r"step 5 was not on the disk after 0\.001 s"):
        saver.wait(0.001)
    disk.let_go.release()
    saver.wait(SOON)
    saver.close(SOON)
    assert disk.written == [5]


def test_a_failure_is_told_once_to_whoever_waits(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.failures = [CheckpointError("the disk is full")]
    saver = Saver(tmp_path, Checkpoint(), disk)
    saver.submit(sample(1))
    disk.let_go.release()
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.wait(SOON)
    saver.close(SOON)


def test_a_failure_is_told_to_whoever_submits_next_whose_request_stands(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.failures = [CheckpointError("the disk is full")]
    saver = Saver(tmp_path, Checkpoint(), disk)
    saver.submit(sample(1))
    assert disk.begun.acquire(timeout=SOON)
    saver.submit(sample(2))
    disk.let_go.release()
    assert disk.begun.acquire(timeout=SOON)  # of step 2, so step 1 has failed by now
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.submit(sample(3))
    disk.let_go.release(2)
    saver.close(SOON)
    assert disk.written == [2, 3]


def test_closing_finishes_what_waits_and_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    saver = Saver(tmp_path, Checkpoint())
    saver.submit(sample(1))
    saver.close(SOON)
    saver.close(SOON)
    assert threading.active_count() == before
    assert len(list_checkpoints(tmp_path)) == 1
    with pytest.raises(CheckpointError, match="step 2 cannot be saved"):
        saver.submit(sample(2))


def test_closing_tells_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    saver = Saver(tmp_path, Checkpoint())
    saver.submit(sample(1))
    with pytest.raises(CheckpointError, match="step 1 could not be written"):
        saver.close(SOON)


def test_a_failing_prune_does_not_deny_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    save(tmp_path, sample(1))
    monkeypatch.setattr("trireme.session.checkpoint.durable.remove", refuse)
    saver = Saver(tmp_path, Checkpoint(keep=1))
    saver.submit(sample(2))
    with pytest.raises(CheckpointError, match="step-000000001 could not be deleted"):
        saver.wait(SOON)
    assert [step_of(path) for path in saver.saved()] == [2]
    saver.close(SOON)


def test_due_by_seconds() -> None:
    schedule = Schedule(Checkpoint(every_seconds=60, every_steps=None), now=100.0, step=0)
    assert not schedule.due(159.9, 50)
    assert schedule.due(160.0, 51)
    schedule.saved(161.0, 51)
    assert not schedule.due(220.9, 99)
    assert schedule.due(221.0, 100)


def test_due_by_steps_even_when_a_multiple_is_passed_over() -> None:
    schedule = Schedule(Checkpoint(every_seconds=None, every_steps=100), now=0.0, step=0)
    assert not schedule.due(1e9, 99)
    assert schedule.due(0.0, 100)
    assert schedule.due(0.0, 103)
    schedule.saved(0.0, 103)
    assert not schedule.due(0.0, 199)
    assert schedule.due(0.0, 200)


def test_nothing_is_due_where_no_step_was_made() -> None:
    schedule = Schedule(Checkpoint(every_seconds=1, every_steps=1), now=0.0, step=7)
    assert not schedule.due(100.0, 7)
    assert schedule.due(0.0, 8)


def test_nothing_is_due_where_nothing_is_asked_for() -> None:
    schedule = Schedule(Checkpoint(every_seconds=None), now=0.0, step=0)
    assert not schedule.due(1e9, 10**9)


@pytest.mark.parametrize("name", ["every_seconds", "every_steps", "keep", "keep_every_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_options_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}={value}"):
        Checkpoint(**{name: value})

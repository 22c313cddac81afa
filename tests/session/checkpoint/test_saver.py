from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError, ConfigurationError
from trireme.location import Location
from trireme.session.checkpoint import CheckpointData, list_checkpoints, load, save, step_of
from trireme.session.checkpoint.place import LocalPlace, Place
from trireme.session.checkpoint.saver import Saver, Schedule
from trireme.session.options import Checkpoint

SOON = 20.0  # a deadline that only a hang reaches


class HeldDisk:
    """A disk that begins to write when told to."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Semaphore(0)
        self.written: list[int] = []
        self.failures: list[Exception] = []

    def __call__(self, place: Place, data: CheckpointData, writer: int) -> Location:
        self.begun.release()
        assert self.let_go.acquire(timeout=SOON)
        if self.failures:
            raise self.failures.pop()
        self.written.append(data.step)
        return save(place, data, writer=writer)


def test_saving_writes_and_prunes(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint(keep=2))
    for step in (1, 2, 3):
        saver.submit(sample(step), 1)
        saver.wait(SOON)
    assert [result.step for result in saver.results()] == [1, 2, 3]
    assert saver.results() == []
    saver.wait(SOON)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 3]
    assert_same(load(list_checkpoints(tmp_path)[-1]), sample(3))


def test_submit_does_not_wait_and_the_newest_request_wins(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = Saver(LocalPlace(tmp_path), Checkpoint(), disk)
    saver.submit(sample(1), 1)
    assert disk.begun.acquire(timeout=SOON)
    for step in (2, 3, 4):
        saver.submit(sample(step), 1)
    disk.let_go.release(2)
    saver.wait(SOON)
    assert disk.written == [1, 4]


def test_wait_keeps_to_its_deadline_and_names_the_step(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = Saver(LocalPlace(tmp_path), Checkpoint(), disk)
    saver.submit(sample(5), 1)
    assert disk.begun.acquire(timeout=SOON)
    with pytest.raises(CheckpointError, match=r"step 5 was not on the disk after 0\.001 s"):
        saver.wait(0.001)
    disk.let_go.release()
    saver.wait(SOON)
    saver.wait(SOON)
    assert disk.written == [5]


def full() -> CheckpointError:
    """What `save` raises when the disk is full."""
    error = CheckpointError("the disk is full")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


def test_whoever_waits_is_told_that_the_newest_is_not_there(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.failures = [full()]
    saver = Saver(LocalPlace(tmp_path), Checkpoint(), disk)
    saver.submit(sample(1), 1)
    disk.let_go.release()
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.wait(SOON)
    assert [(result.step, result.path) for result in saver.results()] == [(1, None)]
    assert saver.results() == []
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.wait(SOON)


def test_a_save_that_failed_does_not_hinder_the_next(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.failures = [full()]
    saver = Saver(LocalPlace(tmp_path), Checkpoint(), disk)
    for step in (1, 2, 3):
        saver.submit(sample(step), 1)
        assert disk.begun.acquire(timeout=SOON)
        disk.let_go.release()
        with suppress(CheckpointError):
            saver.wait(SOON)
    saver.wait(SOON)
    assert disk.written == [2, 3]
    assert [result.step for result in saver.results() if result.error] == [1]


def test_the_last_save_is_tried_again_while_the_disk_is_full(tmp_path: Path) -> None:
    disk, slept = HeldDisk(), list[float]()
    disk.failures = [full(), full()]
    disk.let_go.release(3)
    saver = Saver(LocalPlace(tmp_path), Checkpoint(), disk, sleep=slept.append)
    saver.submit(sample(7), 1, delays=(1.0, 2.0, 4.0))
    saver.wait(SOON)
    assert disk.written == [7]
    assert slept == [1.0, 2.0]
    assert [result.error for result in saver.results()] == [None]


def test_the_last_save_fails_when_no_attempt_is_left(tmp_path: Path) -> None:
    disk, slept = HeldDisk(), list[float]()
    disk.failures = [full(), full()]
    disk.let_go.release(2)
    saver = Saver(LocalPlace(tmp_path), Checkpoint(), disk, sleep=slept.append)
    saver.submit(sample(7), 1, delays=(1.0,))
    with pytest.raises(CheckpointError, match="the disk is full"):
        saver.wait(SOON)
    assert slept == [1.0]


def test_what_is_no_fault_of_the_disk_is_not_tried_again(tmp_path: Path) -> None:
    disk, slept = HeldDisk(), list[float]()
    disk.failures = [CheckpointError("a tensor is sparse")]
    disk.let_go.release()
    saver = Saver(LocalPlace(tmp_path), Checkpoint(), disk, sleep=slept.append)
    saver.submit(sample(7), 1, delays=(1.0, 2.0))
    with pytest.raises(CheckpointError, match="sparse"):
        saver.wait(SOON)
    assert slept == []


def test_waiting_finishes_what_was_submitted_and_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    saver = Saver(LocalPlace(tmp_path), Checkpoint())
    saver.submit(sample(1), 1)
    saver.wait(SOON)
    saver.wait(SOON)
    assert threading.active_count() == before
    assert len(list_checkpoints(tmp_path)) == 1


def test_waiting_tells_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    saver = Saver(LocalPlace(tmp_path), Checkpoint())
    saver.submit(sample(1), 1)
    with pytest.raises(CheckpointError, match="step 1 could not be written"):
        saver.wait(SOON)


def test_a_failing_prune_does_not_deny_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(place: LocalPlace, path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    save(tmp_path, sample(1))
    monkeypatch.setattr(LocalPlace, "remove", refuse)
    saver = Saver(LocalPlace(tmp_path), Checkpoint(keep=1))
    saver.submit(sample(2), 1)
    saver.wait(SOON)
    (result,) = saver.results()
    assert result.path is not None and step_of(result.path) == 2
    assert "step-000000001-writer-1 could not be deleted" in str(result.error)
    saver.wait(SOON)


def test_what_was_not_written_as_it_was_submitted_is_written_again(tmp_path: Path) -> None:
    saver, seen = Saver(LocalPlace(tmp_path), Checkpoint()), list[Location]()

    def seal(data: CheckpointData) -> Callable[[Location], bool]:
        def is_good(path: Location) -> bool:
            assert load(path).step == data.step
            seen.append(path)
            return len(seen) == 2

        return is_good

    saver.seal = seal
    saver.submit(sample(1), 1)
    saver.wait(SOON)
    assert seen == [*list_checkpoints(tmp_path)] * 2


def test_a_checkpoint_that_must_not_be_used_is_removed(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint())

    def is_good(path: Location) -> bool:
        raise CheckpointError("a bit has changed")

    saver.seal = lambda data: is_good
    saver.submit(sample(1), 1)
    with pytest.raises(CheckpointError, match="a bit has changed"):
        saver.wait(SOON)
    assert list_checkpoints(tmp_path) == []


def test_a_save_is_named_by_the_writer_that_began_it(tmp_path: Path) -> None:
    disk = HeldDisk()
    saver = Saver(LocalPlace(tmp_path), Checkpoint(), disk)
    saver.submit(sample(3), 1)
    assert disk.begun.acquire(timeout=SOON)
    save(tmp_path, sample(2), writer=2)  # a chief that has taken over, and is behind
    disk.let_go.release()
    saver.wait(SOON)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-000000003-writer-1",
        "step-000000002-writer-2",
    ]


def test_after_a_failure_the_next_is_due_soon() -> None:
    schedule = Schedule(Checkpoint(every_seconds=600), now=0.0, step=0)
    assert schedule.due(600.0, 50)
    schedule.saved(600.0, 50)
    schedule.failed(601.0)
    assert not schedule.due(630.9, 50)
    assert schedule.due(631.0, 50)  # though no step was made: this one is not there
    schedule.saved(631.0, 50)
    assert not schedule.due(1200.0, 60)


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

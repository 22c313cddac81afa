"""Whatever a save dies of, and wherever, the checkpoint before it can be loaded."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints, save
from trireme.session.checkpoint.atomic_directories import (
    list_directories,
    make_directory,
    publish,
    remove,
    sweep,
)

CALLS = ("fsync", "replace", "mkdir", "open")


class Interruption:
    """Does something instead of the n-th call of `os.fsync`, `os.replace`, `os.mkdir`, `os.open`.

    Every change that a save makes lies between two of these calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, act: Callable[[], object]) -> None:
        self.calls = 0
        self._at = at
        self._act = act
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            self.calls += 1
            if self.calls == self._at:
                self._act()
            return original(*args, **options)

        return call


def disk_full() -> None:
    raise OSError(28, "No space left on device")


def sudden_death() -> None:
    os._exit(9)


def no_complaint(path: Path, reason: CheckpointError) -> None:
    raise AssertionError(f"{path} is damaged: {reason}")


def calls_of_a_save(tmp_path: Path, data: CheckpointData, before: CheckpointData) -> int:
    with pytest.MonkeyPatch.context() as patch:
        save(tmp_path, before)
        count = Interruption(patch, -1, disk_full)
        save(tmp_path, data)
        return count.calls


def different(step: int) -> CheckpointData:
    """A checkpoint of the same step as `sample(step)`, with other content."""
    return CheckpointData(step, sample(step + 1).model, state={"other": True})


SCENARIOS = [(sample(1), sample(2)), (sample(1), different(1))]


@pytest.mark.parametrize(("before", "data"), SCENARIOS, ids=["next step", "same step"])
def test_a_failing_disk_costs_the_new_checkpoint_at_most(
    tmp_path: Path, before: CheckpointData, data: CheckpointData
) -> None:
    calls = calls_of_a_save(tmp_path / "count", data, before)
    failures = 0
    for at in range(1, calls + 1):
        run = tmp_path / str(at)
        save(run, before)
        with pytest.MonkeyPatch.context() as patch:
            Interruption(patch, at, disk_full)
            reported = fails(lambda run=run: save(run, data))
        found = latest(run, no_complaint)
        assert found is not None
        # Where only the last fsync of the directory failed, the new one is in place already.
        assert_same(found, data if found.state == data.state else before)
        assert reported or found.state == data.state
        failures += reported
        save(run, data)
        found = latest(run, no_complaint)
        assert found is not None
        assert_same(found, data)
        assert not hidden(run)
    assert failures > 10


def fails(act: Callable[[], object]) -> bool:
    try:
        act()
    except CheckpointError as error:
        assert "unharmed" in str(error)
        return True
    return False


@pytest.mark.parametrize(("before", "data"), SCENARIOS, ids=["next step", "same step"])
def test_a_process_that_dies_costs_the_new_checkpoint_at_most(
    tmp_path: Path, before: CheckpointData, data: CheckpointData
) -> None:
    calls = calls_of_a_save(tmp_path / "count", data, before)
    for at in range(1, calls + 1):
        run = tmp_path / str(at)
        save(run, before)
        assert in_a_child(lambda at=at, run=run: die_while_saving(run, data, at)) == 9
        found = latest(run, no_complaint)
        assert found is not None
        assert_same(found, data if found.state == data.state else before)
        save(run, sample(3))
        assert [path.name for path in list_checkpoints(run)][-1] == "step-000000003"
        assert len(list_checkpoints(run)) >= 2
        assert not hidden(run)


def die_while_saving(run: Path, data: CheckpointData, at: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Interruption(patch, at, sudden_death)
        save(run, data)


def in_a_child(act: Callable[[], None]) -> int:
    """Runs `act` in a fork of this process and returns the child's exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hidden(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.processes
def test_a_saver_killed_at_any_moment_leaves_what_it_announced(tmp_path: Path) -> None:
    for attempt in range(12):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            save_for_ever(tmp_path, writer)
        os.close(writer)
        announced = -1
        for _ in range(attempt % 4 + 1):
            announced = int(os.read(reader, 10))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        found = latest(tmp_path, no_complaint)
        assert found is not None
        assert found.step >= announced
        assert_same(found, sample(found.step, width=3000))
    save(tmp_path, sample(10**6))
    assert not hidden(tmp_path)


def save_for_ever(run: Path, pipe: int) -> None:
    try:
        step = max((int(path.name[5:]) for path in list_checkpoints(run)), default=0)
        while True:
            step += 1
            save(run, sample(step, width=3000))
            os.write(pipe, b"%10d" % step)
    finally:
        os._exit(1)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A directory that another process of this machine would hold while it saves."""
    path = tmp_path / f".saving-step-000000001.pid{os.getpid()}.00c0ffee"
    path.mkdir()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield path
    os.close(descriptor)


def test_sweep_leaves_what_somebody_is_writing(locked: Path) -> None:
    sweep(locked.parent)
    assert locked.is_dir()


@pytest.mark.parametrize(
    "name", [".saving-step-000000001.pid{pid}.00c0ffee", ".removing-step-000000001.00c0ffee"]
)
def test_sweep_takes_what_nobody_is_writing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.format(pid=os.getpid())
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"partial")
    sweep(tmp_path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("pid", "stays"), [(os.getpid(), True), (2**22 + 1, False)], ids=["alive", "gone"]
)
def test_without_locks_sweep_goes_by_the_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int, stays: bool
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("this file system has no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = tmp_path / f".saving-step-000000001.pid{pid}.00c0ffee"
    path.mkdir()
    sweep(tmp_path)
    assert path.exists() == stays


def test_sweep_leaves_what_is_not_ours(tmp_path: Path) -> None:
    for name in (".notes", "best", ".saving-mine"):
        (tmp_path / name).mkdir()
    (tmp_path / ".removing-step-000000001.00c0ffee").write_text("not a directory")
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {".notes", "best", ".saving-mine"}


def test_what_was_set_aside_stands_in_until_it_is_put_back(tmp_path: Path) -> None:
    aside = tmp_path / ".replaced-step-000000001.00c0ffee"
    aside.mkdir()
    assert list_directories(tmp_path) == {"step-000000001": aside}
    sweep(tmp_path)
    assert list_directories(tmp_path) == {"step-000000001": tmp_path / "step-000000001"}


def test_what_was_set_aside_goes_once_its_successor_is_there(tmp_path: Path) -> None:
    (tmp_path / ".replaced-new.00c0ffee").mkdir()
    (tmp_path / "new").mkdir()
    assert list_directories(tmp_path) == {"new": tmp_path / "new"}
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_publish_puts_back_what_it_could_not_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, final = tmp_path / "staged", tmp_path / "final"
    staged.mkdir()
    final.mkdir()
    (final / "old").touch()
    original = os.replace

    def replace(source: Path, target: Path) -> None:
        if source == staged:
            disk_full()
        original(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        publish(staged, final)
    assert [path.name for path in final.iterdir()] == ["old"]


def test_remove_hides_before_it_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step-000000001"
    path.mkdir()
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    remove(path)
    assert list_directories(tmp_path) == {}
    monkeypatch.undo()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_make_directory_makes_its_parents(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()

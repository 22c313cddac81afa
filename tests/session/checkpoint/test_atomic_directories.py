"""Directories that are published as a whole; see also `test_crash_points`."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.session.checkpoint.disk import hidden
from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError
from trireme.session.checkpoint import latest, list_checkpoints, save
from trireme.session.checkpoint.atomic_directories import (
    list_directories,
    make_directory,
    publish,
    remove,
    sweep,
)


def disk_full() -> None:
    raise OSError(28, "No space left on device")


def no_complaint(path: Path, reason: CheckpointError) -> None:
    raise AssertionError(f"{path} is damaged: {reason}")


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
    assert {path.name for path in tmp_path.iterdir()} == {".notes", "best", ".saving-mine"}


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


@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a directory"])
def test_whatever_has_the_name_of_a_directory_is_replaced_and_removed(
    tmp_path: Path, kind: str
) -> None:
    parent = tmp_path / "parent"
    final, elsewhere = parent / "final", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()

    def make(path: Path) -> None:
        if kind == "file":
            path.touch()
        else:
            path.symlink_to(elsewhere if kind == "link to a directory" else "nowhere")

    for act in (lambda: publish(parent / "staged", final), lambda: remove(final)):
        (parent / "staged").mkdir(parents=True)
        make(final)
        act()
        for path in parent.iterdir():
            assert path.name in ("final", "staged")
            shutil.rmtree(path)
    assert (elsewhere / "kept").exists()

"""Directories that are published as a whole; see also `test_crash_points`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.session.checkpoint.disk import hidden
from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError
from trireme.files import make_directory
from trireme.session.checkpoint import latest, list_checkpoints, save, step_of
from trireme.session.checkpoint.place import LocalPlace


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
        step = max(map(step_of, list_checkpoints(run)), default=0)
        while True:
            step += 1
            save(run, sample(step, width=3000))
            os.write(pipe, b"%10d" % step)
    finally:
        os._exit(1)


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        (".saving-step-000000001-writer-2", False),
        (".saving-step-000000001-writer-3", False),  # its own, of a save that failed
        (".saving-step-000000001-writer-4", True),  # this writer was replaced
        (".removing-step-000000001-writer-4.00c0ffee", False),
        (".notes", True),
        ("best", True),
    ],
)
def test_a_save_deletes_what_writers_up_to_its_own_left(
    tmp_path: Path, name: str, stays: bool
) -> None:
    left = tmp_path / "checkpoints" / name
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"partial")
    path = save(tmp_path, sample(1), writer=3)
    assert left.exists() == stays
    assert list_checkpoints(tmp_path) == [path]


def test_who_was_replaced_while_it_wrote_publishes_nothing_that_is_cut(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)

    def fill(directory: Path, *_: object) -> None:
        (directory / "model.safetensors").write_bytes(b"partial")
        save(tmp_path, sample(5), writer=2)

    with pytest.raises(FileNotFoundError):
        place.write("step-000000009-writer-1", fill)  # type: ignore[arg-type]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000005-writer-2"]
    assert not hidden(tmp_path)


def test_a_checkpoint_is_hidden_before_it_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, sample(1), writer=1)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    LocalPlace(tmp_path).remove(path)
    assert list_checkpoints(tmp_path) == []
    monkeypatch.undo()
    save(tmp_path, sample(2), writer=1)
    assert not hidden(tmp_path)


def test_make_directory_makes_its_parents(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()

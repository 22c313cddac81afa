"""A run directory that fails for a while, or for good, and what of that ends a run."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from trireme.errors import CheckpointError, CheckpointLockLost, ConfigurationError
from trireme.launch.config.task_config import TaskConfig
from trireme.monitor.recording import UNSAVED
from trireme.session.checkpoint import CheckpointData, list_checkpoints, load, step_of
from trireme.session.checkpoint.run_lock import WRITERS, LocalLock, writer_here
from trireme.session.checkpoint.storage import Storage
from trireme.session.observers.progress import Progress
from trireme.session.options import Options
from trireme.session.settings import Settings

INPUTS = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())
EACH = trireme.Checkpoint(every_seconds=None, every_steps=1, keep=100)


class Disk:
    """A disk that is full for as long as `refuses` says so of a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: Callable[[int], bool]) -> None:
        self.refused: list[int] = []
        self._refuses = refuses
        self._rename = os.rename
        monkeypatch.setattr("os.rename", self)
        monkeypatch.setattr("trireme.session.checkpoint.storage.LAST_DELAYS", (0.0, 0.0))

    def __call__(self, source: Path, target: Path) -> None:
        if target.parent.name == "checkpoints":
            step = step_of(target)
            if self._refuses(step):
                self.refused.append(step)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._rename(source, target)


def session(run_dir: Path, steps: int = 6, **options: Any) -> trireme.Session:
    return trireme.Session(
        nn.Linear(8, 2),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_dir=run_dir,
        max_steps=steps,
        **{"checkpoint": EACH, **options},
    )


def train(made: trireme.Session) -> None:
    with made:
        for batch in made.loader(DATA, 10):
            made.step(batch)
            made.worker.storage.settle()  # else one that is slow may be left out


def steps_in(run_dir: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run_dir)]


def test_a_save_that_fails_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(monkeypatch, lambda step: step in (3, 4))
    made = session(tmp_path)
    train(made)
    assert disk.refused == [3, 4]
    assert steps_in(tmp_path) == [1, 2, 5, 6]
    said = capsys.readouterr().out
    assert "the checkpoint of step 3 is NOT SAVED" in said
    assert "No space left on device" in said
    assert "the newest is of step 2" in said
    assert said.count("Training goes on, and the next save is tried within 30 s") == 2
    assert made.worker.storage.alarm == ""  # later ones were saved
    numbers = made.recorder.numbers()
    assert (numbers["checkpoints/failed"], numbers["checkpoints/saved"]) == (2, 4)


def test_the_alarm_is_in_the_status_and_the_report_until_a_save_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, lambda step: step in (2, 3))
    monkeypatch.setattr("trireme.session.worker.recorder._REPORT_SECONDS", 0.0)
    from trireme.records.records import read_starts

    monkeypatch.setattr("trireme.records.records._FIRST_SECONDS", 0.0)
    monkeypatch.setattr("trireme.records.records._SHARE", 0.0)
    train(session(tmp_path))
    (start,) = read_starts(tmp_path)
    alarms = [str(record.status.get(UNSAVED, "")) for record in start.records]
    assert [bool(alarm) for alarm in alarms] == [False, False, True, True, False, False, False]
    assert "step 2 is NOT SAVED" in alarms[2] and "the newest is of step 1" in alarms[2]
    assert "step 3 is NOT SAVED" in alarms[3] and "No space left on device" in alarms[3]


def test_the_last_step_is_saved_though_its_periodic_save_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []

    def once(step: int) -> bool:
        attempts.append(step)
        return step == 6 and attempts.count(6) == 1

    Disk(monkeypatch, once)
    train(session(tmp_path))
    assert attempts.count(6) == 2
    assert steps_in(tmp_path)[-1] == 6


def test_the_last_save_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, lambda step: len(disk.refused) < 2)
    train(session(tmp_path, checkpoint=trireme.Checkpoint(every_seconds=None)))
    assert disk.refused == [6, 6]
    assert steps_in(tmp_path) == [6]


def test_the_last_save_alone_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, lambda step: step > 2)
    with pytest.raises(CheckpointError, match=r"step 6 could not be written.*No space left"):
        train(session(tmp_path))
    assert steps_in(tmp_path) == [1, 2]
    assert disk.refused == [3, 4, 5, 6, 6, 6]  # the last one three times
    session(tmp_path, 2).__enter__().__exit__(None, None, None)  # the directory was given back


def test_a_directory_that_cannot_be_written_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if "writer.json" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigurationError, match="cannot be written: No space left on device"):
        train(session(tmp_path))
    assert list((tmp_path / "writers").iterdir()) == []
    monkeypatch.undo()
    train(session(tmp_path))


def test_a_second_session_is_refused_before_it_trains(tmp_path: Path) -> None:
    with session(tmp_path) as first:
        first.step(DATA[:10])
        first.worker.storage.settle()  # else the next save may replace it
        with pytest.raises(ConfigurationError, match="this program itself writes") as refused:
            session(tmp_path).__enter__()
        assert len(refused.traceback) <= 3  # the caller, what it called, and its job
        first.step(DATA[:10])
    assert steps_in(tmp_path) == [1, 2]
    train(session(tmp_path))


def test_records_too_are_one_jobs_alone(tmp_path: Path) -> None:
    with session(tmp_path, checkpoint=None), pytest.raises(ConfigurationError):
        session(tmp_path, checkpoint=None).__enter__()


def test_a_session_without_a_directory_needs_none() -> None:
    made = trireme.Session(
        nn.Linear(8, 2), nn.CrossEntropyLoss(), lambda p: torch.optim.SGD(p, lr=0.1), max_steps=1
    )
    train(made)


def test_a_chief_of_another_job_publishes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(CheckpointLockLost, match="writes to the run directory"),
        session(tmp_path) as stopped,
    ):
        stopped.step(DATA[:10])
        stopped.worker.storage.settle()
        shutil.rmtree(tmp_path / WRITERS)  # as a file system does that has lost its locks
        other = writer_here("worker:0", "another", epoch="another", stop="kill 1")
        lock = LocalLock(tmp_path).claim(other)
        stopped.step(DATA[:10])
        stopped.worker.storage.settle()
        stopped.step(DATA[:10])
    assert steps_in(tmp_path) == [1]
    assert "the checkpoint of step 2 is NOT SAVED: this program" in capsys.readouterr().out
    lock.release()


def test_an_odd_optimizers_state_does_not_lose_the_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> dict[str, torch.Tensor]:
        raise KeyError(140_000)

    with monkeypatch.context() as patched:
        patched.setattr("trireme.session.backends.local.named_state", broken)
        train(session(tmp_path))
    assert steps_in(tmp_path)[-1] == 6
    said = capsys.readouterr().out
    assert (
        "the checkpoint of step 6 is saved without the optimizer's state (KeyError: 140000" in said
    )
    assert "test_storage.py:" in said  # where it happened
    with session(tmp_path, 8) as again:
        assert again.restored_from == 6
        assert "lacks the optimizer's state" in capsys.readouterr().out
        assert next(again.loader(DATA, 10)).spans == ((60, 70),)


def test_a_tensor_that_no_checkpoint_can_hold_is_left_out_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(8, 2)
    model.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex64))
    made = trireme.Session(
        model,
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_dir=tmp_path,
        max_steps=3,
    )
    train(made)
    said = capsys.readouterr().out
    assert "what it cannot hold of the model: 'spectrum' of torch.complex64" in said
    assert set(load(list_checkpoints(tmp_path)[-1]).model) == {"weight", "bias"}


def storage_of(worker: int, run_dir: Path) -> Storage:
    task = TaskConfig(job="job", index=worker)
    made = Storage(Settings(task, Options(checkpoint=EACH), run_dir), Progress(sys.stdout))
    made.epoch = "one start of the job"
    return made


def checkpoint(step: int) -> CheckpointData:
    return CheckpointData(step, {"w": torch.full((2,), float(step))})


def test_the_directory_goes_from_chief_to_chief(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = storage_of(0, tmp_path), storage_of(1, tmp_path)
    for each in (old, new):
        each.begin(0, restored=False)
    old.open(1)
    old.submit(checkpoint(1), 1)
    old.settle()
    new.follow(2, chief=True)  # worker:0 was stopped, and given up
    new.submit(checkpoint(2), 2)
    new.settle()
    old.submit(checkpoint(3), 1)  # it wakes, and does not know yet
    old.settle()
    assert steps_in(tmp_path) == [1, 2]
    assert "the checkpoint of step 3 is NOT SAVED" in capsys.readouterr().out
    new.follow(3, chief=False)
    old.follow(3, chief=True)  # it has come back
    old.submit(checkpoint(4), 3, last=True)
    assert steps_in(tmp_path) == [1, 2, 4]
    new.close()
    old.close()

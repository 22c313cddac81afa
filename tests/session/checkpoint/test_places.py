"""What holds in every place where checkpoints live: on a disk, and in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.remote.bucket import Bucket
from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError, CheckpointLockLost, ConfigurationError
from trireme.remote.place import RemotePlace
from trireme.session.checkpoint import (
    CheckpointData,
    describe,
    export,
    latest,
    list_checkpoints,
    load,
    prune,
    save,
    verify,
)
from trireme.session.checkpoint import format as checkpoint_format
from trireme.session.checkpoint.local_place import LocalPlace
from trireme.session.checkpoint.place import Location, Lock, Place
from trireme.session.checkpoint.run_lock import Writer, writer_here


class Run:
    """A run directory that several processes open."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.bucket = Bucket()
        self.locks: list[Lock] = []

    def open(self) -> Place:
        return RemotePlace(self.bucket.store()) if self.path is None else LocalPlace(self.path)

    def claimed(self, writer: Writer) -> tuple[Place, Lock]:
        place = self.open()
        self.locks.append(place.claim(writer))
        return place, self.locks[-1]

    def damage(self, name: str) -> None:
        """Changes the last byte of a file of the newest checkpoint."""
        if self.path is not None:
            file = max(self.path.glob(f"checkpoints/*/{name}"))
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            return
        key = max(key for key in self.bucket.objects if key.endswith(name))
        file = self.bucket.objects[key]
        content = file.getvalue()
        file.seek(len(content) - 1)
        file.write(bytes([content[-1] ^ 1]))


@pytest.fixture(params=["disk", "object store"])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    run = Run(tmp_path / "run" if request.param == "disk" else None)
    monkeypatch.setattr(checkpoint_format, "place_of_checkpoint", lambda path: (run.open(), path))
    yield run
    for lock in run.locks:
        lock.release()


def writer(epoch: str, *, view: int = 0) -> Writer:
    return writer_here("worker:0", "job", epoch=epoch, view=view)


def test_a_checkpoint_is_read_as_it_was_saved(run: Run, tmp_path: Path) -> None:
    place, _ = run.claimed(writer("a"))
    path = save(place, sample(), shard_bytes=16)
    assert path.name == "step-000000007"
    assert_same(load(path), sample())
    streamed = load(path, streamed=True)
    assert torch.equal(streamed.model["fc.weight"], sample().model["fc.weight"])
    verify(path)
    assert describe(path).model == {"fc.weight": ("F32", (3, 2)), "fc.bias": ("F32", (3,))}
    assert describe(path).path == path
    assert export(path, tmp_path / "out.safetensors").stat().st_size > 24


def test_checkpoints_are_listed_replaced_and_pruned(run: Run) -> None:
    place, _ = run.claimed(writer("a"))
    for step in (10, 2, 30, 4):
        save(place, sample(step))
    newer = CheckpointData(4, sample(5).model)
    path = save(place, newer)
    assert [each.name[-2:] for each in list_checkpoints(run.open())] == ["02", "04", "10", "30"]
    assert_same(load(path), newer)
    gone = prune(place, 2, good=list_checkpoints(place)[-1])
    assert [each.name[-2:] for each in gone] == ["02", "04"]
    assert [each.name[-2:] for each in list_checkpoints(run.open())] == ["10", "30"]
    with pytest.raises(CheckpointError):
        load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_damage_is_noticed_and_the_checkpoint_before_is_taken(run: Run, name: str) -> None:
    place, _ = run.claimed(writer("a"))
    save(place, sample(1))
    path = save(place, sample(2))
    run.damage(name)
    with pytest.raises(CheckpointError, match=f"{path}.*damaged"):
        verify(path)
    passed: list[Location] = []
    found = latest(run.open(), lambda path, error: passed.append(path))
    assert found is not None
    assert_same(found, sample(1))
    assert passed == [path]


def test_a_save_that_fails_leaves_what_was_there(run: Run) -> None:
    place, _ = run.claimed(writer("a"))
    path = save(place, sample(1))
    bad = CheckpointData(1, {"a": torch.ones(3), "b": torch.ones(2).to_sparse()})
    with pytest.raises(CheckpointError, match="sparse"):
        save(place, bad)
    assert_same(load(path), sample(1))
    assert list_checkpoints(run.open()) == [path]


def test_another_job_is_refused_while_one_writes(run: Run) -> None:
    _, lock = run.claimed(writer("a"))
    with pytest.raises(ConfigurationError, match="writes to the run directory"):
        run.claimed(writer("b"))
    lock.release()
    assert not lock.held
    _, other = run.claimed(writer("b"))
    assert other.held


def test_a_later_chief_takes_over_and_the_earlier_one_cannot_publish(run: Run) -> None:
    place, lock = run.claimed(writer("a", view=1))
    save(place, sample(1), allowed=lock.check)
    later, successor = run.claimed(writer("a", view=2))
    with pytest.raises(CheckpointLockLost, match="may no longer write"):
        save(place, sample(2), allowed=lock.check)
    save(later, sample(3), allowed=successor.check)
    assert [each.name[-1] for each in list_checkpoints(run.open())] == ["1", "3"]
    with pytest.raises(ConfigurationError, match="may write there no more"):
        run.claimed(writer("a", view=1))


def test_an_empty_run_has_no_checkpoint(run: Run) -> None:
    assert list_checkpoints(run.open()) == []
    assert latest(run.open(), lambda path, error: None) is None

"""What holds in every place where checkpoints live, here on a disk; plug-ins run it with theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError, ConfigurationError
from trireme.location import Location
from trireme.session.checkpoint import (
    CheckpointData,
    describe,
    latest,
    list_checkpoints,
    load,
    prune,
    save,
    verify,
)
from trireme.session.checkpoint.place import LocalPlace, Place
from trireme.session.checkpoint.run_lock import RunLock, Writer, writer_here


class Run:
    """A run directory that several processes open.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.locks: list[RunLock] = []

    def open(self) -> Place:
        return LocalPlace(self.path)

    def claimed(self, writer: Writer) -> tuple[Place, RunLock]:
        place = self.open()
        self.locks.append(place.claim(writer))
        return place, self.locks[-1]

    def damage(self, name: str) -> None:
        """Changes the last byte of a file of the newest checkpoint."""
        file = max(self.path.glob(f"checkpoints/*/{name}"))
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def close(self) -> None:
        for lock in self.locks:
            lock.release()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    yield run
    run.close()


def writer(epoch: str, *, view: int = 0) -> Writer:
    return writer_here("worker:0", "job", epoch=epoch, view=view)


def test_a_checkpoint_is_read_as_it_was_saved(run: Run, tmp_path: Path) -> None:
    place, lock = run.claimed(writer("a"))
    path = save(place, sample(), writer=lock.number, shard_bytes=16)
    assert path.name == "step-000000007-writer-1"
    assert_same(load(path), sample())
    streamed = load(path, streamed=True)
    assert torch.equal(streamed.model["fc.weight"], sample().model["fc.weight"])
    verify(path)
    assert describe(path)[1]["model"] == {"fc.weight": ("F32", (3, 2)), "fc.bias": ("F32", (3,))}


def names(paths: list[Location]) -> list[str]:
    return [path.name.removeprefix("step-00000000") for path in paths]


def test_checkpoints_are_listed_replaced_and_pruned(run: Run) -> None:
    place, lock = run.claimed(writer("a"))
    for step in (9, 2, 7, 4):
        save(place, sample(step), writer=lock.number)
    newer = CheckpointData(4, sample(5).model)
    path = save(place, newer, writer=lock.number)  # it went back behind the step, and made it again
    assert names(list_checkpoints(run.open())) == [f"{step}-writer-1" for step in (2, 4, 7, 9)]
    assert_same(load(path), newer)
    gone = prune(place, 2, spared=[list_checkpoints(place)[-1]])
    assert names(gone) == ["2-writer-1", "4-writer-1"]
    assert names(list_checkpoints(run.open())) == ["7-writer-1", "9-writer-1"]
    with pytest.raises(CheckpointError):
        load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_damage_is_noticed_and_the_checkpoint_before_is_taken(run: Run, name: str) -> None:
    place, lock = run.claimed(writer("a"))
    save(place, sample(1), writer=lock.number)
    path = save(place, sample(2), writer=lock.number)
    run.damage(name)
    with pytest.raises(CheckpointError, match=f"{path}.*damaged"):
        verify(path)
    passed: list[Location] = []
    found = latest(run.open(), lambda path, error: passed.append(path))
    assert found is not None
    assert_same(found, sample(1))
    assert passed == [path]


def test_a_save_that_fails_leaves_what_was_there(run: Run) -> None:
    place, lock = run.claimed(writer("a"))
    path = save(place, sample(1), writer=lock.number)
    bad = CheckpointData(1, {"a": torch.ones(3), "b": torch.ones(2).to_sparse()})
    with pytest.raises(CheckpointError, match="sparse"):
        save(place, replace(bad, step=2), writer=lock.number)
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


def test_a_program_claims_the_directory_for_its_save(run: Run) -> None:
    _, lock = run.claimed(writer("a"))
    with pytest.raises(ConfigurationError, match="writes to the run directory"):
        save(run.open(), sample(1))
    lock.release()
    assert names([save(run.open(), sample(1))]) == ["1-writer-2"]


def test_what_a_replaced_chief_ends_late_is_an_older_checkpoint(run: Run) -> None:
    place, lock = run.claimed(writer("a", view=1))
    save(place, sample(1), writer=lock.number)
    later, successor = run.claimed(writer("a", view=2))
    assert successor.held
    path = save(later, sample(3), writer=successor.number)
    save(place, sample(4), writer=lock.number)
    save(place, sample(3), writer=lock.number)
    assert names(list_checkpoints(run.open())) == [
        "1-writer-1",
        "3-writer-1",
        "4-writer-1",
        "3-writer-2",
    ]
    assert names(prune(place, 1, spared=[path])) == ["1-writer-1", "3-writer-1", "4-writer-1"]
    with pytest.raises(ConfigurationError, match="may write there no more"):
        run.claimed(writer("a", view=1))


def test_an_empty_run_has_no_checkpoint(run: Run) -> None:
    assert list_checkpoints(run.open()) == []
    assert latest(run.open(), lambda path, error: None) is None

"""Sessions whose run directory is in an object store (in memory, of this process)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from trireme.location import RemotePath
from trireme.remote.object_store import ObjectStore
from trireme.session.checkpoint import list_checkpoints, step_of
from trireme.session.hooks import Hook

INPUTS = torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS, (INPUTS.sum(1) > 0).long())


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    url = f"memory://{uuid.uuid4().hex}/run"
    yield url
    for key in [key for key in MemoryFileSystem.store if key.startswith(url[8:44])]:
        del MemoryFileSystem.store[key]


def session(url: str, **options: Any) -> trireme.Session:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    return trireme.Session(model, nn.CrossEntropyLoss(), sgd, run_dir=url, **options)


def train(session: trireme.Session) -> None:
    for batch in session.loader(DATA, batch_size=10):
        session.step(batch)


def test_a_run_is_resumed_and_equals_one_that_was_not_interrupted(url: str) -> None:
    for steps in (7, 20):
        with session(url, max_steps=steps) as part:
            train(part)
    assert part.restored_from == 7
    with session(f"{url}-whole", max_steps=20) as whole:
        train(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(part.model.state_dict()[name], value), name
    at_seven = f"{url}/checkpoints/step-000000007-writer-1"
    with session(url, resume=at_seven, max_steps=9) as back:
        train(back)
    assert back.restored_from == 7
    with session(url, max_steps=30) as on:
        assert on.restored_from == 9, "the last writer's, not the one of step 20"


def test_checkpoints_are_uploaded_and_nothing_else(url: str, tmp_path: Path) -> None:
    with session(url, max_steps=3, log_every=1) as run:
        train(run)
    assert run.run_dir is not None
    (run.run_dir / "job.secret").write_text("x")
    store = ObjectStore(RemotePath(url))
    folders = {key.split("/")[0] for key in store.list("")}
    assert folders == {"checkpoints", "writers"}
    from trireme.records.records import read_starts

    assert read_starts(run.run_dir)[0].records[-1].status["global_step"] == 3


class Paths(Hook):
    def __init__(self) -> None:
        self.paths: list[str] = []

    def on_checkpoint(self, session: trireme.Session, path: Path | RemotePath) -> None:
        self.paths.append(str(path))


def test_steps_go_on_while_an_upload_is_held(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held, go = threading.Event(), threading.Event()
    put = MemoryFileSystem.put_file

    def slow(self: MemoryFileSystem, file: str, path: str, **options: Any) -> None:
        if "/checkpoints/" in path:
            held.set()
            assert go.wait(60), "the upload was never let go"
        put(self, file, path, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    hook = Paths()
    made = 0
    with session(
        url, max_steps=200, checkpoint=trireme.Checkpoint(every_steps=10), hooks=[hook]
    ) as run:
        for batch in run.loader(DATA, batch_size=10):
            run.step(batch)
            if held.is_set():
                made += 1  # while the upload of the first checkpoint waits
                if made == 50:
                    assert list_checkpoints(url) == []
                    go.set()
    assert made >= 50
    assert hook.paths[0].startswith(f"{url}/checkpoints/step-0000000")


def test_a_store_that_fails_for_a_while_does_not_end_training(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, put = [False], MemoryFileSystem.put_file

    def fail(self: MemoryFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        if failing[0]:
            raise ConnectionResetError("connection reset by peer")
        put(self, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", fail)
    with session(url, max_steps=40, checkpoint=trireme.Checkpoint(every_steps=10)) as run:
        for batch in run.loader(DATA, batch_size=10):
            run.step(batch)
            failing[0] = 5 <= run.global_step < 30
            if run.global_step == 20:
                run.worker.storage.settle()
    told = capsys.readouterr()
    assert "NOT SAVED" in told.out + told.err
    assert "connection reset by peer" in told.out + told.err
    assert step_of(list_checkpoints(url)[-1]) == 40

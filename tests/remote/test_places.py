"""What holds in every place where checkpoints live, in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.bucket import Bucket
from tests.session.checkpoint import test_places as everywhere
from tests.session.checkpoint.test_places import *  # noqa: F403  # its tests
from trireme.remote.place import RemotePlace
from trireme.session.checkpoint import format as checkpoint_format
from trireme.session.checkpoint.place import Place


class Run(everywhere.Run):
    """A run directory in an object store."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bucket = Bucket()

    def open(self) -> Place:
        return RemotePlace(self.bucket.store())

    def damage(self, name: str) -> None:
        key = max(key for key in self.bucket.objects if key.endswith(name))
        file = self.bucket.objects[key]
        content = file.getvalue()
        file.seek(len(content) - 1)
        file.write(bytes([content[-1] ^ 1]))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    monkeypatch.setattr(checkpoint_format, "place_of_checkpoint", lambda path: (run.open(), path))
    yield run
    run.close()

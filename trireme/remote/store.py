"""A run directory in an object store, as the core opens it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.location import RemotePath, Store
from trireme.remote.mirror import Mirror, job_of
from trireme.remote.object_store import ObjectStore


class RemoteStore(Store):
    """A run directory in an object store that fsspec opens."""

    def __init__(self, where: RemotePath) -> None:
        self._objects = ObjectStore(where)

    def place(self) -> object:
        from trireme.remote.place import RemotePlace  # imports PyTorch

        return RemotePlace(self._objects)

    def mirror(self, directory: Path, names: Sequence[str], allowed: Callable[[], bool]) -> Mirror:
        return Mirror(self._objects, directory, names, allowed)

    def job(self) -> str:
        return job_of(self._objects)

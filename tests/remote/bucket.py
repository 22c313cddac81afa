"""An object store in memory, as several processes see it, that fails when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from trireme.location import RemotePath
from trireme.remote.object_store import ObjectStore

URL = RemotePath("memory://bucket/run")


class Killed(BaseException):
    """The process does nothing any more."""


class Bucket:
    """What all processes share: the objects, and the order of requests."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.lock = threading.RLock()

    def store(self, **hooks: Any) -> ObjectStore:
        """The store as one process sees it; see `View`."""
        return ObjectStore(URL, View(self, **hooks))

    @property
    def keys(self) -> list[str]:
        return sorted(key.removeprefix("/bucket/run/") for key in self.objects)


class View(MemoryFileSystem):
    """The file system of one process. `before` and `after` are called around each request that
    changes or reads something, with its number; what they raise, the request raises.
    """

    cachable = False

    def __init__(
        self,
        bucket: Bucket,
        before: Callable[[int], None] = lambda number: None,
        after: Callable[[int], None] = lambda number: None,
    ) -> None:
        super().__init__()
        self.store = bucket.objects
        self.pseudo_dirs = []
        self.requests = 0
        self.conditional = True
        self._bucket = bucket
        self._before, self._after = before, after

    def _request(self, action: Callable[[], Any]) -> Any:
        with self._bucket.lock:
            self.requests += 1
            number = self.requests
        self._before(number)
        try:
            with self._bucket.lock:
                return action()
        finally:
            self._after(number)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        mode = mode if self.conditional else "overwrite"
        self._request(lambda: super(View, self).pipe_file(path, value, mode=mode))

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> Any:
        return self._request(lambda: super(View, self).cat_file(path, start, end))

    def find(self, path: str, **options: Any) -> Any:
        return self._request(lambda: super(View, self).find(path, **options))

    def rm_file(self, path: str) -> None:
        self._request(lambda: super(View, self)._rm(path))


def dies_at(number: int, *, after: bool) -> dict[str, Callable[[int], None]]:
    """Hooks of a process that is killed at its request of that number, or right after it."""

    def die(request: int) -> None:
        if request > number or (request == number and not after):
            raise Killed

    def die_after(request: int) -> None:
        if request >= number:
            raise Killed

    return {"before": die, "after": die_after if after else lambda request: None}

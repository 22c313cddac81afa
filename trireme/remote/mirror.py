"""Uploads what a process writes in its local directory: records, event files, logs.

A thread looks every few seconds for changed files, and uploads each as a whole. A large file waits
until it has grown by a twentieth, so that a long run uploads a file some dozens of times. A failed
upload is told once and tried again; it never ends training. Only the named files and folders are
uploaded: no secret, key, lock or socket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from trireme.remote.object_store import ObjectStore

SECONDS = 15.0
"""How often the thread looks for changed files."""

RUN_FILES = ("job.json", "records", "logs", "tensorboard", "traces", "pipeline.png")
"""What of a run directory may be uploaded."""

_SMALL = 1 << 20
_COARSE_NS = 1_000_000_000  # files have coarser times than the clock
_GROWTH = 1.05
_CLOSE_SECONDS = 60.0
_CLOSE_FAILING_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Mirror:
    """Uploads the named files and folders of a directory, until it is closed."""

    def __init__(
        self,
        store: ObjectStore,
        directory: Path,
        names: Sequence[str],
        allowed: Callable[[], bool] = lambda: True,
        seconds: float = SECONDS,
    ) -> None:
        self._store = store
        self._directory = directory
        self._names = [name for name in names if name in RUN_FILES]
        self._allowed = allowed
        self._seconds = seconds
        self._uploaded: dict[Path, tuple[int, int]] = {}  # size, time of the last change
        self._failing = False
        self._closed = threading.Event()
        self._begun_at = time.time_ns() - _COARSE_NS
        self._thread = threading.Thread(target=self._run, name="trireme-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Uploads what has changed, for a minute at most, or less where the last upload failed.

        May be called again.
        """
        self._closed.set()
        self._thread.join(_CLOSE_FAILING_SECONDS if self._failing else _CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning(
                "what was written last in %s is not uploaded: %s does not answer",
                self._directory,
                self._store.root,
            )

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            self._upload(last=False)
        self._upload(last=True)

    def _upload(self, *, last: bool) -> None:
        try:
            if not self._allowed():
                return
            for path in self._files():
                found = path.stat()
                now, before = (found.st_size, found.st_mtime_ns), self._uploaded.get(path)
                if before is None and found.st_mtime_ns < self._begun_at:
                    continue  # an earlier job's
                grown = before is None or found.st_size >= before[0] * _GROWTH
                if now != before and (last or grown or found.st_size < _SMALL):
                    self._store.put(path.relative_to(self._directory).as_posix(), path.read_bytes())
                    self._uploaded[path] = now
            self._failing = False
        except OSError as error:
            if not self._failing:
                _log.warning("%s is not uploaded for now: %s", self._directory, error)
            self._failing = True

    def _files(self) -> Iterator[Path]:
        for name in self._names:
            path = self._directory / name
            for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if each.is_file() and not each.is_symlink():
                    yield each


def job_of(store: ObjectStore) -> str:
    """Returns the id of the job that writes to a run directory, or wrote last; "" for none."""
    numbers = sorted(key for key in store.list("writers") if key.endswith("/writer.json"))
    return msgspec.json.decode(store.read(numbers[-1]), type=_JobOf).job if numbers else ""


class _JobOf(msgspec.Struct):
    job: str

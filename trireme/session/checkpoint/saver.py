"""The schedule of checkpoints, and the thread that writes them during training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.session.checkpoint.format import CheckpointData, save
from trireme.session.checkpoint.history import prune
from trireme.session.checkpoint.place import Place
from trireme.session.options import Checkpoint

_log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # the seconds after which a failed save is retried at the latest


class Schedule:
    """Decides when a checkpoint is due. It is pure: callers pass the time and the step."""

    def __init__(self, options: Checkpoint, now: float, step: int) -> None:
        self._seconds = options.every_seconds
        self._steps = options.every_steps
        self._saved_at = now
        self._saved_step = step
        self._retry_at: float | None = None

    def due(self, now: float, step: int) -> bool:
        """Returns whether to save a global step now: a later one, or one that failed, again."""
        if self._retry_at is not None and now >= self._retry_at:
            return True
        if step <= self._saved_step:
            return False
        if self._steps is not None and step // self._steps > self._saved_step // self._steps:
            return True
        return self._seconds is not None and now - self._saved_at >= self._seconds

    def saved(self, now: float, step: int) -> None:
        self._saved_at, self._saved_step, self._retry_at = now, step, None

    def failed(self, now: float) -> None:
        self._retry_at = now + RETRY_SECONDS


class SaveResult(NamedTuple):
    """The result of a save."""

    step: int
    path: Location | None  # None where it could not be written
    error: Exception | None  # or why old checkpoints could not be deleted after it


class _Waiting(NamedTuple):
    data: CheckpointData
    writer: int
    delays: Sequence[float]
    is_good: Callable[[Location], bool]


Seal = Callable[[CheckpointData], Callable[[Location], bool]]
"""Takes a checkpoint that is to be written; returns what looks at it once it is, and returns
whether it need not be written again."""


class Saver:
    """Writes checkpoints on a thread of its own, one at a time, and deletes old ones.

    Where checkpoints are submitted faster than the disk takes them, the newest waits, and those in
    between are dropped.
    """

    def __init__(
        self,
        place: Place,
        options: Checkpoint,
        write: Callable[..., Location] = save,
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._place, self._options = place, options
        self._write, self._sleep = write, sleep
        self.seal: Seal = lambda data: lambda path: True
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None
        self._writing: int | None = None  # the step; None where no thread writes
        self._newest: Exception | None = None  # why the last save failed
        self._results: list[SaveResult] = []
        self._thread: threading.Thread | None = None  # the newest; it may have ended

    def submit(self, data: CheckpointData, writer: int, delays: Sequence[float] = ()) -> None:
        """Submits a checkpoint and returns at once; `delays` come before further attempts."""
        is_good = self.seal(data)
        with self._lock:
            self._waiting = _Waiting(data, writer, delays, is_good)
            if self._writing is None:
                self._writing = data.step
                self._thread = threading.Thread(target=self._run, name="trireme-saver", daemon=True)
                self._thread.start()

    def results(self) -> list[SaveResult]:
        if not self._results:
            return []
        with self._lock:
            ended, self._results = self._results, []
        return ended

    def wait(self, timeout: float) -> None:
        """Waits until all submitted checkpoints are on the disk; raises why the last is not."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                waiting = self._waiting
                step = waiting.data.step if waiting else self._writing
                raise CheckpointError(
                    f"the checkpoint of step {step} was not on the disk after {timeout:g} s: "
                    f"{self._place.run_dir} is slow or hangs; earlier checkpoints are unharmed"
                )
        if self._newest is not None:
            raise self._newest

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._writing = None
                    return
                begun, self._waiting = self._waiting, None
                self._writing = begun.data.step
            result = self._save(begun)
            with self._lock:
                self._results.append(result)
                self._newest = result.error if result.path is None else None

    def _save(self, begun: _Waiting) -> SaveResult:
        data, further = begun.data, iter(begun.delays)
        while True:
            try:
                path = self._write(self._place, data, writer=begun.writer)
                try:
                    if begun.is_good(path):
                        break
                except Exception:
                    self._place.remove(path)
                    raise
            except Exception as error:  # reported by `results` and `wait`
                cause, delay = error.__cause__, next(further, None)
                if delay is None or not isinstance(cause, OSError):
                    return SaveResult(data.step, None, error)
                _log.warning("%s; it is tried again in %g s", error, delay)
                self._sleep(delay)
        options = self._options
        try:
            prune(self._place, options.keep, options.keep_every_steps, spared=[path])
        except Exception as error:  # the checkpoint itself is written
            return SaveResult(data.step, path, error)
        return SaveResult(data.step, path, None)

"""The schedule of checkpoints, and the thread that writes them during training."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.ps.snapshot import TableMark
from trireme.session.checkpoint.format import CheckpointData, save
from trireme.session.checkpoint.history import prune
from trireme.session.checkpoint.place import Place
from trireme.session.checkpoint.places import RunDir, place_of
from trireme.session.checkpoint.streamed import shapes_of
from trireme.session.options import Checkpoint

_log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""The seconds after which a failed save is retried at the latest."""

LAST_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 29.0)
"""The seconds that the last save of a run waits before each further attempt: a minute in all."""


class Schedule:
    """Decides when a checkpoint is due. It is pure: callers pass the time and the step."""

    def __init__(self, options: Checkpoint, now: float, step: int) -> None:
        self._seconds = options.every_seconds
        self._steps = options.every_steps
        self._saved_at = now
        self._saved_step = step
        self._retry_at: float | None = None

    def due(self, now: float, step: int) -> bool:
        """Returns whether to save the global step `step` now.

        A step is due when `every_seconds` have passed since the last call of `saved`, or when a
        multiple of `every_steps` has been reached since; never when no step has been made since.
        After `failed`, it is also due when `RETRY_SECONDS` have passed.
        """
        if self._retry_at is not None and now >= self._retry_at:
            return True
        if step <= self._saved_step:
            return False
        if self._steps is not None and step // self._steps > self._saved_step // self._steps:
            return True
        return self._seconds is not None and now - self._saved_at >= self._seconds

    def saved(self, now: float, step: int) -> None:
        """Notes that `step` is saved, or about to be."""
        self._saved_at = now
        self._saved_step = step
        self._retry_at = None

    def failed(self, now: float) -> None:
        self._retry_at = now + RETRY_SECONDS


class SaveResult(NamedTuple):
    """The result of a save.

    Attributes:
        step: the global step.
        path: the directory of the checkpoint; None where it could not be written.
        error: why it could not be written, or why old checkpoints could not be deleted after it;
            None for no failure.
    """

    step: int
    path: Location | None
    error: Exception | None


class Base(NamedTuple):
    """A checkpoint that another one may follow, with what has changed in the tables.

    Attributes:
        step: the global step.
        path: where it is.
        mark: the point of the tables' history.
        links: how many saves of changes it is made of.
        whole: the bytes of the last save of all rows.
        changed: the bytes of the changes since.
    """

    step: int
    path: Location
    mark: TableMark
    links: int
    whole: int
    changed: int


class _Waiting(NamedTuple):
    """A checkpoint that is to be written; see `Saver.submit`, and `Saver.forget_base`."""

    data: CheckpointData
    writer: int
    delays: Sequence[float]
    history: int


def _save(place: Place, data: CheckpointData, writer: int) -> Location:
    return save(place, data, writer=writer)


class Saver:
    """Writes checkpoints on a thread of its own, one at a time, and deletes old ones.

    Where checkpoints are submitted faster than the disk takes them, the newest waits, and those in
    between are dropped. `results` returns how saves ended; after a failure later saves are tried.
    Only `wait` and `close` raise, if the last submitted checkpoint is not on the disk. A `Saver`
    must be closed: its thread ends with the process, and an unfinished write is lost. There is a
    thread only while there is something to write.
    """

    def __init__(
        self,
        run_dir: RunDir,
        options: Checkpoint,
        write: Callable[[Place, CheckpointData, int], Location] = _save,
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._place = place_of(run_dir)
        self._options = options
        self._write = write
        self._sleep = sleep
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None
        self._writing: int | None = None  # the step; None where no thread writes
        self._closed = False
        self._newest: Exception | None = None  # why the last save failed
        self._results: list[SaveResult] = []
        self._thread: threading.Thread | None = None  # the newest; it may have ended
        self._base: Base | None = None  # the last one written
        self._followed: Base | None = None  # see `base`
        self._history = 0  # of the tables: counts the calls of `forget_base`

    def base(self) -> Base | None:
        """Returns the checkpoint that the next one may follow; it stays until the next call.

        None if the next one is to have all rows of the tables.
        """
        with self._lock:
            base = self._base
            if base is not None and (
                base.links + 1 >= self._options.whole_tables_every
                or base.changed > base.whole
                or not self._place.has(base.path)
            ):
                base = None
            self._followed = base
            return base

    def forget_base(self) -> None:
        """Has the next checkpoint have all rows of the tables, as the history is another one."""
        with self._lock:
            self._base = self._followed = None
            self._history += 1

    def submit(self, data: CheckpointData, writer: int, delays: Sequence[float] = ()) -> None:
        """Submits a checkpoint and returns at once."""
        with self._lock:
            if self._closed:
                raise CheckpointError(
                    f"step {data.step} cannot be saved: the saver of {self._place.run_dir} is "
                    "closed"
                )
            self._waiting = _Waiting(data, writer, delays, self._history)
            if self._writing is None:
                self._writing = data.step
                self._thread = threading.Thread(target=self._run, name="trireme-saver", daemon=True)
                self._thread.start()

    def results(self) -> list[SaveResult]:
        """Returns the saves that ended since the last call, oldest first."""
        if not self._results:
            return []
        with self._lock:
            ended, self._results = self._results, []
        return ended

    def wait(self, timeout: float) -> None:
        """Waits until all submitted checkpoints are on the disk."""
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

    def close(self, timeout: float) -> None:
        """Waits for submitted checkpoints; no more can be submitted. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self.wait(timeout)

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
                path = self._write(self._place, data, begun.writer)
            except Exception as error:  # reported by `results`, `wait` and `close`
                if data.since is not None and not _is_full(error.__cause__):
                    self.forget_base()  # it may be that which cannot be followed
                delay = next(further, None)
                if delay is None or not isinstance(error.__cause__, OSError):
                    return SaveResult(data.step, None, error)
                _log.warning("%s; it is tried again in %g s", error, delay)
                self._sleep(delay)
            else:
                break
        followed = self._written(data, path, begun.history)
        keep, every = self._options.keep, self._options.keep_every_steps
        try:
            prune(self._place, keep, every, good=path, left_alone=followed)
        except Exception as error:  # the checkpoint itself is written
            return SaveResult(data.step, path, error)
        return SaveResult(data.step, path, None)

    def _written(self, data: CheckpointData, path: Location, history: int) -> list[Location]:
        """Notes what was written, as the base of the next; returns what others still follow."""
        nbytes = sum(tensor.nbytes for tensor in shapes_of(data.tables).values())
        with self._lock:
            followed = self._followed
            self._base = None
            if data.mark is None or history != self._history:
                pass
            elif data.since is None:
                self._base = Base(data.step, path, data.mark, 0, nbytes, 0)
            elif followed is not None and followed.step == data.since:
                changed = followed.changed + nbytes
                self._base = Base(
                    data.step, path, data.mark, followed.links + 1, followed.whole, changed
                )
            return [] if followed is None else [followed.path]


def _is_full(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)

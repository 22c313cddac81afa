"""When to save, and saving while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from trireme.errors import CheckpointError
from trireme.session.checkpoint.format import CheckpointData, save
from trireme.session.checkpoint.history import prune
from trireme.session.options import Checkpoint

__all__ = ["Saver", "Schedule"]

_log = logging.getLogger(__name__)


class Schedule:
    """When a checkpoint is due. Pure: it is told the time and the step.

    Args:
        options: every how many seconds and steps.
        now: the time at which training begins, in seconds.
        step: the global step at which it begins.
    """

    def __init__(self, options: Checkpoint, now: float, step: int) -> None:
        self._seconds = options.every_seconds
        self._steps = options.every_steps
        self._saved_at = now
        self._saved_step = step

    def due(self, now: float, step: int) -> bool:
        """Returns whether to save the global step `step` now.

        It is, when `every_seconds` have passed since the last `saved`, or when a multiple of
        `every_steps` has been reached since; never when no step has been made since.
        """
        if step <= self._saved_step:
            return False
        if self._steps is not None and step // self._steps > self._saved_step // self._steps:
            return True
        return self._seconds is not None and now - self._saved_at >= self._seconds

    def saved(self, now: float, step: int) -> None:
        """Notes that `step` is saved, or about to be."""
        self._saved_at = now
        self._saved_step = step


class Saver:
    """Writes checkpoints on a thread of its own, one at a time, and deletes those too old.

    Where requests come faster than the disk takes them, the newest waits its turn and those in
    between are dropped. Whoever made a `Saver` must `close` it: the thread does not outlive the
    process, and what is being written when the process ends is lost.

    Args:
        run_dir: the run's directory.
        options: how many to keep.
        write: writes one checkpoint and returns its directory.
    """

    def __init__(
        self,
        run_dir: str | Path,
        options: Checkpoint,
        write: Callable[[Path, CheckpointData], Path] = save,
    ) -> None:
        self._run_dir = Path(run_dir)
        self._options = options
        self._write = write
        self._changed = threading.Condition()
        self._waiting: CheckpointData | None = None
        self._writing: int | None = None
        self._closed = False
        self._error: Exception | None = None
        self._saved: list[Path] = []
        self._thread = threading.Thread(target=self._run, name="trireme-saver", daemon=True)
        self._thread.start()

    def submit(self, data: CheckpointData) -> None:
        """Asks for a checkpoint and returns at once.

        Args:
            data: what to write. It belongs to the saver now: nobody may change its tensors.

        Raises:
            CheckpointError: an earlier save failed (this one is accepted all the same), or the
                saver is closed (this one is not).
        """
        with self._changed:
            if self._closed:
                raise CheckpointError(
                    f"step {data.step} cannot be saved: the saver of {self._run_dir} is closed"
                )
            self._waiting = data
            self._changed.notify_all()
            self._raise_error()

    def saved(self) -> list[Path]:
        """Returns the checkpoints completed since this was last asked, the oldest first."""
        with self._changed:
            completed, self._saved = self._saved, []
        return completed

    def wait(self, timeout: float) -> None:
        """Waits until everything submitted is on the disk.

        Args:
            timeout: the longest to wait, in seconds.

        Raises:
            CheckpointError: a save failed since this was last said, or the time is over.
        """
        with self._changed:
            done = self._changed.wait_for(self._idle, timeout)
            self._raise_error()
            if not done:
                step = self._waiting.step if self._waiting else self._writing
                raise CheckpointError(
                    f"the checkpoint of step {step} was not on the disk after {timeout:g} s: "
                    f"{self._run_dir} is slow or hangs; earlier checkpoints are unharmed"
                )

    def close(self, timeout: float) -> None:
        """Waits for what was submitted and ends the thread. Closing twice does nothing.

        Raises:
            CheckpointError: as `wait`. The saver is closed all the same.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.wait(timeout)
        self._thread.join(timeout)

    def _idle(self) -> bool:
        return self._waiting is None and self._writing is None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while self._serve():
            pass

    def _serve(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            data, self._waiting = self._waiting, None
            if data is None:
                return False
            self._writing = data.step
        try:
            self._save(data)
        except Exception as error:  # whoever submits or waits next is told
            _log.warning("saving step %d failed: %s", data.step, error)
            with self._changed:
                self._error = self._error or error
        with self._changed:
            self._writing = None
            self._changed.notify_all()
        return True

    def _save(self, data: CheckpointData) -> None:
        path = self._write(self._run_dir, data)
        with self._changed:
            self._saved.append(path)
        options = self._options
        prune(self._run_dir, options.keep, options.keep_every_steps, good=path)

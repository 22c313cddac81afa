"""The run directory of a job: its lock, the schedule of checkpoints, and their results.

Only the chief writes, and holds the directory's lock. A save that fails is reported and counted,
and later saves are tried nevertheless. Only a failed last save fails the job.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from trireme.errors import CheckpointError, CheckpointLockLost, ConfigurationError
from trireme.location import Location, StoreError
from trireme.session.checkpoint import CheckpointData, list_checkpoints, step_of
from trireme.session.checkpoint.place import Place, place_of
from trireme.session.checkpoint.run_lock import writer_here
from trireme.session.checkpoint.saver import RETRY_SECONDS, Saver, Schedule, Seal
from trireme.session.observers.progress import Progress
from trireme.session.settings import Settings

LAST_DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 29.0)  # seconds before each further last save

_SAVE_SECONDS = 600.0


class Storage:
    """The run directory, for a worker that is chief or may become chief."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.epoch = ""  # of the job; set when it is known
        self.completed: list[Location] = []  # that the session has not announced
        self.saved = self.failed = 0  # checkpoints that this process has written, or could not
        self.submitted: int | None = None  # the step of the last save, unless it was lost
        self.alarm = ""  # why the last checkpoint is not saved, and what the newest is
        self._newest: int | None = None  # the step of the newest checkpoint that it knows of
        self._run_dir = settings.home
        self._options = settings.options.checkpoint
        self._progress = progress
        self._task = settings.task
        self._place: Place | None = None if self._run_dir is None else place_of(self._run_dir)
        self._saver: Saver | None = None
        if self._place is not None and self._options is not None:
            self._saver = Saver(self._place, self._options)
        self.scheduled = self._saver is not None
        self._schedule: Schedule | None = None

    def seal_by(self, seal: Seal) -> None:
        """Has a function look at what is saved."""
        if self._saver is not None:
            self._saver.seal = seal

    def open(self, view: int) -> None:
        if self._place is None:
            return
        try:
            self._take(self._place, view, first=True)
        except OSError as error:
            problem = f"the run directory {self._run_dir} cannot be written: {_problem(error)}"
            if self._options is None:
                self._progress.warn(f"no records are kept: {problem}")
                return
            again = isinstance(error, StoreError) and not error.denied
            raise (CheckpointError if again else ConfigurationError)(
                f"{problem}; {'try again later, ' if again else ''}choose another (run_dir= or "
                "--run-dir), or save nothing (checkpoint=None)"
            ) from error

    def follow(self, view: int, *, chief: bool) -> None:
        """Takes the directory over from the previous chief, or releases it, after a new view."""
        if not chief:
            self._release()
        elif self._place is not None:
            try:
                self._take(self._place, view)
            except (OSError, ConfigurationError) as error:  # it is tried again at the next save
                self._progress.warn(f"{_problem(error)}: nothing is saved until that is over")

    def _take(self, place: Place, view: int, *, first: bool = False) -> None:
        if place.lock.held:
            return
        self._release()
        task = self._task
        stop = f"trireme stop {Path(task.records).parent.resolve()}" if task.records else ""
        writer = writer_here(task.name, task.job, epoch=self.epoch, view=view, stop=stop)
        place.claim(writer, first=first)

    def _release(self) -> None:
        if self._place is not None:
            self._place.lock.release()

    def begin(self, step: int, *, restored: bool) -> None:
        if self._options is not None and self._place is not None:
            self._schedule = Schedule(self._options, time.monotonic(), step)
            self.submitted = self._newest = step if restored else None

    def due(self, step: int) -> bool:
        return self._schedule is not None and self._schedule.due(time.monotonic(), step)

    def begun(self, step: int) -> None:
        """Notes, in the chief, that it saves a step; its successor knows when it began itself."""
        if self._schedule is not None:
            self._schedule.saved(time.monotonic(), step)

    def submit(self, data: CheckpointData, view: int, *, last: bool = False) -> None:
        """Writes a checkpoint in the background; the last one before it returns, with retries."""
        assert self._saver is not None and self._place is not None
        self.submitted = data.step
        try:
            self._take(self._place, view)
        except (OSError, ConfigurationError) as error:
            if last:
                lost = isinstance(error, ConfigurationError)
                raise (CheckpointLockLost if lost else CheckpointError)(
                    f"step {data.step} is not saved: {_problem(error)}"
                ) from error
            self._warn_not_saved(data.step, error)
            return
        self._saver.submit(data, self._place.lock.number, LAST_DELAYS if last else ())
        if last:
            self._saver.wait(_SAVE_SECONDS + sum(LAST_DELAYS))

    def settle(self) -> None:
        if self._saver is not None:
            with suppress(CheckpointError):  # reported by `look`, or raised by `submit`
                self._saver.wait(_SAVE_SECONDS + sum(LAST_DELAYS))
            self.look()

    def look(self) -> None:
        """Counts and reports the saves that ended since the last call; cheap if there are none."""
        for step, path, error in self._saver.results() if self._saver is not None else ():
            if path is not None:
                self.completed.append(path)
                self.saved += 1
                self._newest, self.alarm = step, ""
            if path is not None and error is not None:
                self._progress.warn(f"step {step} is saved, but {error}")
            elif error is not None:
                self._warn_not_saved(step, error)

    def take_completed(self) -> list[Location]:
        self.look()
        completed, self.completed = self.completed, []
        return completed

    def close(self) -> None:
        """Waits for submitted checkpoints, and releases the directory. May be called again."""
        try:
            self.settle()
        finally:
            self._release()

    def _warn_not_saved(self, step: int, error: Exception) -> None:
        self.failed += 1
        self.submitted = None
        if self._schedule is not None:
            self._schedule.failed(time.monotonic())
        newest = "this process has saved none"
        if self._newest is not None:
            newest = f"the newest is of step {self._newest}"
        self.alarm = f"the checkpoint of step {step} is NOT SAVED: {_problem(error)}; {newest}"
        self._progress.warn(
            f"{self.alarm}. Training goes on, and the next save is tried within "
            f"{RETRY_SECONDS:.0f} s"
        )

    def loss(self, lost: str, step: int, copies: int) -> str:
        """Returns what a job loses that has ended because a task was lost, in a sentence."""
        self.settle()
        saved = [] if self._place is None else list_checkpoints(self._place)
        newest = step_of(saved[-1]) if saved else 0
        count = max(step - newest, 0)
        where = f"The newest checkpoint is of step {newest}" if saved else "There is no checkpoint"
        answer = "; with --replicas 2 it goes on when a server dies" if copies == 1 else ""
        return (
            f"{lost} was lost at step {step} or a little later. {where}: "
            f"{count} step{'s' * (count != 1)}, or a few more, are lost{answer}"
        )


def _problem(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)

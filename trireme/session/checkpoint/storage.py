"""The run directory of a job: its lock, the schedule of checkpoints, and their results.

Only the chief writes, and holds the directory's lock. A save that fails is reported and counted,
and later saves are tried nevertheless. Only a failed last save fails the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trireme.errors import CheckpointError, CheckpointLockLost, ConfigurationError
from trireme.remote.object_store import StoreError
from trireme.session.checkpoint import (
    CheckpointData,
    describe,
    list_checkpoints,
    save,
    step_of,
)
from trireme.session.checkpoint.place import Location, Lock, Place
from trireme.session.checkpoint.places import place_of
from trireme.session.checkpoint.run_lock import read_writer, writer_here
from trireme.session.checkpoint.saver import (
    LAST_DELAYS,
    RETRY_SECONDS,
    Base,
    Saver,
    Schedule,
)
from trireme.session.observers.progress import Progress
from trireme.session.settings import Settings

_SAVE_SECONDS = 600.0
_CHIEF_SECONDS = 3.0
_POLL_SECONDS = 0.05


class Storage:
    """The run directory, for a worker that is chief or may become chief.

    Args:
        settings: the run directory, when to save, and which checkpoints to keep.
        progress: shows failures.

    Attributes:
        run_dir: the directory of checkpoints, or its URL; None for none.
        epoch: the epoch of the job; set when it is known.
        scheduled: whether checkpoints are to be written at all.
        completed: the checkpoints that were completed and that the session has not announced.
        saved: the number of checkpoints that this process has completed.
        failed: the number of checkpoints that it could not write.
        newest: the step of the newest checkpoint that it knows of; None for none.
        submitted: the step of the last save that was begun, unless it was lost; None for none.
        alarm: why the last checkpoint is not saved, and what the newest is; "" while all is well.
    """

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.epoch = ""  # known when this worker has joined the job
        self.run_dir = settings.home
        self.completed: list[Location] = []
        self.saved = 0
        self.failed = 0
        self.newest: int | None = None
        self.submitted: int | None = None
        self.alarm = ""
        self._options = settings.options.checkpoint
        self._progress = progress
        self._task = settings.task
        self._lock: Lock | None = None
        self._place: Place | None = None if self.run_dir is None else place_of(self.run_dir)
        self._saver: Saver | None = None
        if self._place is not None and self._options is not None:
            write = partial(save, allowed=self._allowed)
            self._saver = Saver(self._place, self._options, write, allowed=self._allowed)
        self.scheduled = self._saver is not None
        self._after_a_failure = (
            f"Training goes on, and the next save is tried within {RETRY_SECONDS:.0f} s"
        )
        self._schedule: Schedule | None = None

    # -- the right to write ---------------------------------------------------------------------

    def open(self, view: int) -> None:
        """Takes the directory, as chief of a job that begins, and checks that it is writable.

        Raises:
            ConfigurationError: another job writes to it, or it is not writable; says which.
            CheckpointError: an object store does not answer, or only that it cannot now.
        """
        if self._place is None or self._holds_lock:
            return
        try:
            if (refused := self._take(view, first=True)) is not None:
                raise refused
            if self._options is not None:
                self._place.prepare()
        except OSError as error:
            problem = f"the run directory {self.run_dir} cannot be written: {_problem(error)}"
            if self._options is None:
                self._progress.warn(f"no records are kept: {problem}")
                return
            again = isinstance(error, StoreError) and not error.denied
            raise (CheckpointError if again else ConfigurationError)(
                f"{problem}; {'try again later, ' if again else ''}choose another (run_dir= or "
                "--run-dir), or save nothing (checkpoint=None)"
            ) from error

    def follow(self, view: int, *, chief: bool) -> None:
        """Takes the directory over from the previous chief, or releases it, after a new view.

        A directory that cannot be taken now is tried again at the next save.
        """
        if not chief:
            self._release()
        elif self.run_dir is not None:
            self._take_over(view)

    @property
    def _holds_lock(self) -> bool:
        return self._lock is not None and self._lock.held

    def _take_over(self, view: int) -> bool:
        """Takes the directory, or warns; returns whether this process has it."""
        refused = self._take(view)
        if refused is not None:
            self._progress.warn(f"{_problem(refused)}: nothing is saved until that is over")
        return refused is None

    def _take(self, view: int, *, first: bool = False) -> OSError | ConfigurationError | None:
        """Takes the directory if this process does not have it; returns why it cannot."""
        assert self._place is not None
        if self._holds_lock:
            return None
        self._release()
        task = self._task
        stop = f"trireme stop {Path(task.records).parent.resolve()}" if task.records else ""
        writer = writer_here(task.name, task.job, epoch=self.epoch, view=view, stop=stop)
        try:
            self._lock = self._place.claim(writer, first=first)
        except (OSError, ConfigurationError) as error:
            return error
        return None

    def base(self) -> Base | None:
        """Returns the checkpoint that the next one may follow; see `Saver.base`."""
        return None if self._saver is None else self._saver.base()

    def forget_base(self) -> None:
        """Has the next checkpoint have all rows of the tables, as the job has other values now."""
        if self._saver is not None:
            self._saver.forget_base()

    def _release(self) -> None:
        self.forget_base()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _allowed(self) -> None:
        """Checks that this process may write; see `RunLock.check`."""
        if self._lock is None:
            raise CheckpointLockLost(
                f"{self._task.name} does not write to {self.run_dir} any more: it is not chief"
            )
        self._lock.check()

    # -- when to save ---------------------------------------------------------------------------

    def begin(self, step: int, *, restored: bool) -> None:
        """Starts the schedule at a step.

        Args:
            step: the global step.
            restored: whether a checkpoint of that step exists.
        """
        if self._options is not None and self.run_dir is not None:
            self._schedule = Schedule(self._options, time.monotonic(), step)
            self.submitted = self.newest = step if restored else None

    def due(self, step: int) -> bool:
        """Returns whether to save that global step now."""
        return self._schedule is not None and self._schedule.due(time.monotonic(), step)

    def begun(self, step: int) -> None:
        """Notes that this worker, or the chief, saves a step."""
        if self._schedule is not None:
            self._schedule.saved(time.monotonic(), step)

    def has(self, step: int) -> bool:
        """Returns whether the step was submitted before; notes that it is submitted now."""
        known = step == self.submitted
        self.submitted = step
        return known

    def durability(self, copies: int) -> str:
        """Returns what the loss of a server, or of all copies, costs at most, in a sentence.

        Args:
            copies: how many servers hold each shard.
        """
        options = self._options
        lost = "a server dies" if copies == 1 else f"all {copies} copies of a shard are lost"
        if options is None or self.run_dir is None:
            why = "there is no run_dir" if self.run_dir is None else "checkpoint=None"
            return f"nothing is saved ({why}): if {lost}, the whole run can be lost"
        bounds = []
        if options.every_steps is not None:
            bounds.append(f"{options.every_steps} step{'s' * (options.every_steps > 1)}")
        if options.every_seconds is not None:
            bounds.append(f"{options.every_seconds:g} s")
        if not bounds:
            return f"only the end is saved: if {lost}, all steps of this run can be lost"
        return (
            f"at most {' or '.join(bounds)} can be lost if {lost}, and the time that a save takes: "
            f"what is newer than the newest checkpoint in {self.run_dir}"
        )

    # -- saving ---------------------------------------------------------------------------------

    def submit(self, data: CheckpointData, view: int) -> None:
        """Writes a checkpoint in the background; `look` reports the result."""
        assert self._saver is not None
        if self._take_over(view):
            self._saver.submit(data)
        else:
            self._warn_not_saved(data.step)

    def submit_last(self, data: CheckpointData, view: int) -> None:
        """Writes the last checkpoint; retries for a minute if writing fails.

        Raises:
            CheckpointError: the checkpoint is not on the disk.
            CheckpointLockLost: another process writes to the directory; names it.
        """
        assert self._saver is not None
        refused = self._take(view)
        if refused is not None:
            lost = isinstance(refused, ConfigurationError)
            raise (CheckpointLockLost if lost else CheckpointError)(
                f"step {data.step} is not saved: {_problem(refused)}"
            ) from refused
        self._after_a_failure = "It was the last one"
        self._saver.submit(data, LAST_DELAYS)
        self._saver.wait(_SAVE_SECONDS + sum(LAST_DELAYS))

    def settle(self, *, at_the_end: bool = False) -> None:
        """Waits for the save that is under way, and reports its result."""
        if at_the_end:
            self._after_a_failure = "Training has ended, and its last step is saved now"
        if self._saver is not None:
            with suppress(CheckpointError):
                self._saver.wait(_SAVE_SECONDS + sum(LAST_DELAYS))
            self.look()

    def look(self) -> None:
        """Counts and reports the saves that ended since the last call; cheap if there are none."""
        for step, path, error in self._saver.results() if self._saver is not None else ():
            if path is not None:
                self.completed.append(path)
                self.saved += 1
                self.newest = step
                self.alarm = ""
            if path is not None and error is not None:
                self._progress.warn(f"step {step} is saved, but {error}")
            elif isinstance(error, CheckpointLockLost):
                self.submitted = None
                self._progress.message(f"step {step} is not saved here: {error}")
            elif error is not None:
                self._warn_not_saved(step, error)

    def take_completed(self) -> list[Location]:
        """Returns the checkpoints that were completed since the last call."""
        self.look()
        completed, self.completed = self.completed, []
        return completed

    # -- after the loss of a server -------------------------------------------------------------

    def rescue(
        self,
        step: int,
        view: int,
        *,
        chief: bool,
        lacks: Sequence[str],
        values: Callable[[dict[str, Any]], CheckpointData] | None,
    ) -> str:
        """Saves a surviving worker's values, in a job that is over; deletes no checkpoint.

        The optimizer's state, the moving average and the ledger of examples are lost with the
        server. Every worker has the values of its last pull in memory, those of the lost server
        included. If the server was lost during the pull, some values are of a later step than
        others, which can happen in asynchronous training anyway.

        The values are saved if they are newer than the newest checkpoint. The chief, which holds
        the directory's lock, saves first. Another worker saves if its values are newer still, or if
        the chief is gone or stopped.

        Args:
            step: the global step of the values.
            view: the number of the last view.
            chief: whether this worker was chief in that view.
            lacks: the parts that no worker has, in words.
            values: makes the checkpoint, given the `state` of the newest one; {} where there is
                none. None where the job has sparse tables: their rows are lost, so that the next
                run must go on from the newest checkpoint, which has them.

        Returns:
            What is lost, in a sentence; "" where another worker reports it.
        """
        if not self.scheduled or self._place is None:
            return f"{_lost_steps(1, step)}: nothing was saved, for there is no run directory"
        self.settle(at_the_end=True)
        taken = self._take_after(view, 0.0 if chief else _CHIEF_SECONDS)
        newest, state = 0, dict[str, Any]()
        for path in reversed(list_checkpoints(self._place)):
            with suppress(CheckpointError):
                newest, state = step_of(path), describe(path).state
                break
        if step <= newest:
            if not (taken and chief):
                return ""
            return f"the chief has no values newer than the newest checkpoint, of step {newest}"
        if not taken:
            return (
                f"{_lost_steps(newest + 1, step)}, unless the task that holds the lock on the "
                "run directory saves them: it still holds the lock"
            )
        if values is None:
            return (
                f"{_lost_steps(newest + 1, step)}: no worker has the rows of sparse tables; more "
                "--replicas make such a loss less likely"
            )
        try:
            self.completed.append(save(self._place, values(state), allowed=self._allowed))
        except CheckpointError as error:
            return f"{_lost_steps(newest + 1, step)}: their values could not be saved: {error}"
        before = f"step {newest}" if newest else "none"
        return (
            f"the newest checkpoint was of {before}, and the values of step {step} are saved "
            f"now; lost are {_listed(lacks)}, and what others have learned after that step"
        )

    def _take_after(self, view: int, seconds: float) -> bool:
        """Takes the directory within a time, or then from a chief whose process is stopped.

        A chief that is only slow keeps it, as it may be saving.
        """
        deadline = time.monotonic() + seconds
        while self._take(view) is not None:
            if time.monotonic() >= deadline:
                # As chief of the next view, which was never made.
                writer = read_writer(self.run_dir) if isinstance(self.run_dir, Path) else None
                return writer is not None and writer.stopped and self._take(view + 1) is None
            time.sleep(_POLL_SECONDS)
        return True

    def close(self) -> None:
        """Waits for submitted checkpoints, and releases the directory. May be called again."""
        try:
            if self._saver is not None:
                with suppress(CheckpointError):  # reported by `look`, or raised by `submit_last`
                    self._saver.close(_SAVE_SECONDS)
                self.look()
        finally:
            self._release()

    def _warn_not_saved(self, step: int, error: Exception | None = None) -> None:
        """Warns that a step is not saved."""
        self.failed += 1
        self.submitted = None
        if self._schedule is not None:
            self._schedule.failed(time.monotonic())
        why = f": {error}" if error is not None else ""
        newest = (
            "there is none yet" if self.newest is None else f"the newest is of step {self.newest}"
        )
        self.alarm = f"the checkpoint of step {step} is NOT SAVED{why}; {newest}"
        self._progress.warn(f"{self.alarm}. {self._after_a_failure}")


def _lost_steps(first: int, last: int) -> str:
    """Returns in words which steps are lost."""
    return f"step {last} is lost" if first >= last else f"steps {first} to {last} are lost"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _problem(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)

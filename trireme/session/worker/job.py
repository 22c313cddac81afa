"""A program's part in its job: what `Session`, `trireme.distribute` and `ps.connect` share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from trireme.errors import JobFailed, UsageError
from trireme.launch.environment import leave_task
from trireme.launch.exit_reason import INTERRUPTED
from trireme.location import RemotePath
from trireme.ps.results import PushResult, after_the_end
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.worker.ending import finish
from trireme.session.worker.recorder import Recorder
from trireme.session.worker.stopping import Signals
from trireme.session.worker.worker import Worker


class Job:
    """Joins a job, takes signals while the program trains, ends training, and leaves the job."""

    def __init__(
        self, setup: TrainingSetup, *, own_loop: bool = False, records: bool = True
    ) -> None:
        self.worker = worker = Worker(setup, own_loop=own_loop)
        # Called before and after this worker waits for the end of training.
        self.before_end: Callable[[], None] = lambda: None
        self.after_end: Callable[[], None] = lambda: None
        # Called for each complete checkpoint, when training is saved, and when the job fails.
        self.on_checkpoint: Callable[[Path | RemotePath], None] = lambda path: None
        self.on_stop: Callable[[str], None] = lambda reason: None
        self.on_fail: Callable[[BaseException], None] = lambda error: None
        self.exits = ExitStack()  # closed when the job is left
        self.ended = False
        self.left = False
        try:
            worker.start()
        except BaseException as error:
            worker.fail(error)
            if isinstance(error, JobFailed) and worker.lifecycle.was_interrupted:
                raise SystemExit(INTERRUPTED) from error
            if isinstance(error, UsageError):  # the traceback through this package helps no user
                raise error.with_traceback(None) from error.__cause__
            raise
        if (part := setup.part) is not None:
            part.say, part.warn = worker.progress.message, worker.progress.warn
        self._recorder = Recorder(worker, own_loop=own_loop) if records else None
        self._signals = Signals(worker.lifecycle.interrupt)
        worker.lifecycle.enter("training")

    @property
    def recorder(self) -> Recorder:
        assert self._recorder is not None, "this job was joined without records"
        return self._recorder

    def may_update(self) -> bool:
        """Returns whether to make an update; False in the iteration in which training has ended.

        With prefetch the step to come finishes the push that is under way. A later iteration is an
        error, or ends the process where the job was interrupted.
        """
        worker = self.worker
        if not worker.backend.stopping or worker.push_under_way:
            return True
        if worker.last_iteration.leaves_out():
            return False
        self.end()
        self._exit_if_interrupted()
        raise after_the_end(worker.task.index, worker.backend.global_step)

    def complete(self) -> PushResult | None:
        """Waits for the update that is under way, and exchanges local ones."""
        last = self.worker.complete()
        if last is not None and self._recorder is not None:
            self._recorder.count(last.decided, last.steps)
        return last

    def announce_checkpoints(self) -> None:
        """Shows the checkpoints that are complete since the last call."""
        for path in self.worker.storage.take_completed():
            self.worker.progress.message(f"saved {path}")
            self.on_checkpoint(path)

    def end(self) -> None:
        """Ends training: waits for the other workers, and the chief saves. Only once."""
        if self.ended or self.worker.forked:
            return
        self.ended = True
        self.before_end()
        self.complete()
        if self._recorder is not None:
            self._recorder.training_ended()
        finish(self.worker)
        self.announce_checkpoints()
        self.after_end()

    def leave(self, error: BaseException | None = None) -> None:
        """Ends training and leaves the job; an error fails the job instead. Only once."""
        if self.left or self.worker.forked:
            return
        self.left = True
        leave_task(self.worker.task)
        try:
            if error is None:
                self._leave_well()
            else:
                self._fail(error)
        finally:
            self.exits.close()
            self._signals.restore()
        if error is None:
            self._exit_if_interrupted()

    def _leave_well(self) -> None:
        lifecycle, recorder = self.worker.lifecycle, self._recorder
        try:
            self.end()  # it waits for other workers: signals still ask to stop
            self.on_stop(lifecycle.ended_early or "finished")
            if recorder is not None:
                recorder.finish()
                recorder.close()
        except BaseException as failure:
            self._fail(failure)
            raise
        reason = lifecycle.ended_early
        if reason and not self.worker.storage.scheduled:
            self.worker.warn_as_chief(
                "nothing is saved, and the same command begins anew: there is no run directory "
                "(run_dir=, or --run-dir), or checkpoint=None"
            )
        lifecycle.leave("interrupted" if reason else "finished", reason or "")

    def _fail(self, error: BaseException) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self.worker.fail(error)
        self.on_fail(error)

    def _exit_if_interrupted(self) -> None:
        if status := self.worker.lifecycle.exit_status:
            raise SystemExit(status)

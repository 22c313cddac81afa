"""A worker's checkpoints: restores and saves the job, and rescues values if a server is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trireme.cluster.view import View
from trireme.errors import JobFailed, WireError
from trireme.launch.exit_reason import describe
from trireme.ps.snapshot import ModelState
from trireme.session.checkpoint import CheckpointData
from trireme.session.checkpoint.checkpointer import LACKS, Checkpointer
from trireme.session.checkpoint.storage import Storage
from trireme.session.lifecycle import Lifecycle
from trireme.session.replica.buffers import Buffers

__all__ = ["WorkerCheckpoints"]


class WorkerCheckpoints:
    """Restores and saves a job, in a worker that is chief or may become chief.

    Args:
        lifecycle: the worker's, which has joined.
        storage: writes checkpoints to the run directory.

    Attributes:
        buffers: the buffers and frozen parameters of the model.
        restored_from: the step of the checkpoint that this worker, as chief, restored; None for
            none.
        last_step: the global step of this worker's values while training ends; None before.
    """

    def __init__(self, lifecycle: Lifecycle, storage: Storage) -> None:
        self.buffers = Buffers(lifecycle.setup, lifecycle.backend)
        self.restored_from: int | None = None
        self.last_step: int | None = None
        self._lifecycle = lifecycle
        self._setup = lifecycle.setup
        self._backend = lifecycle.backend
        self._storage = storage
        self._progress = lifecycle.progress
        self._checkpointer = Checkpointer(
            self._setup, self.buffers, self._progress, lifecycle.epoch
        )
        self._copied: CheckpointData | None = None  # not written yet: see `step_made`
        self._view: View | None = None  # the last view that was handled

    # -- at the beginning -----------------------------------------------------------------------

    def first_state(self) -> ModelState:
        """Returns the chief's initial values, or those of the newest undamaged checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model, or a named one cannot be read.
            ConfigurationError: the run directory cannot be written, or has conflicting content.
        """
        flat = self._setup.flat
        self._storage.open(self._lifecycle.view_number)
        checkpoint = self._checkpointer.find()
        if checkpoint is None:
            self._lifecycle.enter("initialising")
            flat.collect_values()
            state = ModelState(0, {n: p.detach().cpu() for n, p in flat.parameters.items()})
        else:
            self._lifecycle.enter("restoring", f"step {checkpoint.step}")
            self.restored_from = checkpoint.step
            state = self._checkpointer.restore(checkpoint, self._backend.local_optimizers)
        self.buffers.hand_out()
        return state

    def take_first(self) -> None:
        """Takes over the constants and optimizer state that the chief has shared."""
        if not self._lifecycle.is_chief:
            self.buffers.take()
        local, step = self._backend.local_optimizers, self._backend.global_step
        if local is not None and not local.take() and step:
            self._progress.message(
                f"this worker's optimizer begins with fresh state at step {step}"
            )
        self.buffers.spread()

    # -- while training goes on -----------------------------------------------------------------

    def follow_view(self) -> None:
        """Takes the run directory if this worker is chief, and releases it otherwise."""
        self._view = self._lifecycle.view
        self._storage.follow(self._lifecycle.view_number, chief=self._lifecycle.is_chief)

    def ask_all(self) -> None:
        """Requests to save the next step if it is due, where all workers take part in saving."""
        backend = self._backend
        if backend.saves is not None:
            due = self._lifecycle.is_chief and self._storage.due(backend.global_step + 1)
            backend.wants_save = due

    def step_made(self, *, exchanged: bool) -> None:
        """Saves the step if it is due; handles a new view.

        Workers that train locally share the state of their optimizers right after the exchange
        whose step is saved. After the next exchange all of them have done so, and the copy of that
        step is written.

        Args:
            exchanged: whether an exchange has ended since the last call.
        """
        storage, backend = self._storage, self._backend
        if self._lifecycle.view is not self._view:
            self.follow_view()
        if not storage.scheduled:
            return
        if exchanged:
            self._write()
        storage.look()
        agreed = backend.saves
        if storage.due(backend.global_step) if agreed is None else agreed:
            storage.begun(backend.global_step)
            if self._lifecycle.is_chief or backend.together:
                self._copy()
        if backend.local_optimizers is None:
            self._write()

    def save(self) -> None:
        """Copies a consistent state and has it written in the background."""
        self.leave_local_state()
        self._copy()
        self._write()

    def leave_local_state(self) -> None:
        """Shares the state of this worker's own optimizer with the chief, where it has one."""
        if self._backend.local_optimizers is not None:
            self._backend.local_optimizers.leave()

    def _copy(self) -> None:
        """Copies a consistent state; an earlier copy is written first."""
        if not self._storage.scheduled:
            return
        self._write()
        with self._lifecycle.liveness.excused("it saves"):
            state = self._backend.snapshot(state=True)
        known = self._storage.has(state.step)
        if self._lifecycle.is_chief and not known:  # other workers only take part
            self._copied = self._checkpointer.checkpoint_of(state)

    def _write(self, *, last: bool = False) -> None:
        """Writes the copy in the background; with `last`, before it returns."""
        data, local = self._copied, self._backend.local_optimizers
        if data is None:
            return
        self._copied = None
        if local is not None:
            data = self._checkpointer.with_local(data, local)
        write = self._storage.submit_last if last else self._storage.submit
        write(data, self._lifecycle.view_number)

    # -- at the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Saves the last step, as chief, after training has ended on all workers.

        Raises:
            CheckpointError: the checkpoint is not on the disk.
        """
        self.buffers.settle()
        if self._lifecycle.is_chief and self._setup.settings.run_dir is not None:
            self._lifecycle.enter("saving")
            self._write()
            self._storage.settle(at_the_end=True)
            self.leave_local_state()
            self._copy()
            self._write(last=True)

    def rescue(self, error: BaseException) -> None:
        """Saves this worker's values if a server was lost, and reports what is lost with it."""
        lifecycle = self._lifecycle
        lost = lifecycle.lost_with(error)
        if (
            not lost.startswith(("ps:", "coordinator:"))
            or lifecycle.left
            or describe(error).kind != "victim"
        ):
            return
        self._backend.go_back()
        step = self._backend.global_step if self.last_step is None else self.last_step
        lacks = self._checkpointer.lost_with_servers()
        values = partial(self._rescued, lost, step, lacks)
        view, chief = lifecycle.view_number, lifecycle.is_chief
        try:
            loss = self._storage.rescue(step, view, chief=chief, lacks=lacks, values=values)
        except Exception as failure:  # the job's own error must stay visible
            loss = f"and the values could not be saved: {type(failure).__name__}: {failure}"
        if loss:
            said = f"{lost} was lost at step {step} or a little later: {loss}"
            self._progress.warn(said)
            if isinstance(error, JobFailed | WireError):
                error.loss = said

    def _rescued(
        self, lost: str, step: int, lacks: Sequence[str], before: Mapping[str, Any]
    ) -> CheckpointData:
        """Returns a checkpoint of this worker's values.

        Args:
            lost: the name of the task that was lost.
            step: the global step of the values.
            lacks: the parts that the checkpoint lacks.
            before: the `state` of the newest checkpoint.
        """
        parameters = self._setup.flat.parameters
        state = ModelState(step, {n: p.detach().cpu().clone() for n, p in parameters.items()})
        kept = {name: before.get(name, {}) for name in ("consumed", "sizes")}
        more = {LACKS: list(lacks), "rescued_from": lost, **kept}
        return self._checkpointer.checkpoint_of(state, more)

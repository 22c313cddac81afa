"""A worker's checkpoints: restores and saves the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch

from trireme.cluster.view import View
from trireme.errors import CheckpointError, ConfigurationError, JobFailed, RolledBack, WireError
from trireme.launch.config.task_config import BY_HAND
from trireme.ps.messages import OptimizerSpec
from trireme.ps.optimizers import export_state, members, name_of
from trireme.ps.snapshot import ModelState
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints, load
from trireme.session.checkpoint.restored import JobState, check_model, converted, job_state
from trireme.session.checkpoint.storage import Storage
from trireme.session.checkpoint.streamed import joined, renamed, shapes_of
from trireme.session.checkpoint.tensors import held
from trireme.session.model.module_names import named_parameters, state_of
from trireme.session.worker.buffers import Buffers
from trireme.session.worker.lifecycle import Lifecycle
from trireme.session.worker.optimizer_parameters import check_replaced


class WorkerCheckpoints:
    """Restores and saves a job, in a worker that is chief or may become chief."""

    def __init__(self, lifecycle: Lifecycle, storage: Storage) -> None:
        self.buffers = Buffers(lifecycle.setup, lifecycle.backend)
        self.restored_from: int | None = None  # the step of the checkpoint, in the chief
        # What the program keeps, to be saved; and, decoded, that of the checkpoint restored.
        self.kept: Callable[[], dict[str, str]] = dict
        self.known_kept: dict[str, bytes] = {}
        self._lifecycle = lifecycle
        self._setup = lifecycle.setup
        self._backend = lifecycle.backend
        self._storage = storage
        self._progress = lifecycle.progress
        self._copied: CheckpointData | None = None  # not written yet: see `step_made`
        self._view: View | None = None  # the last view that was handled

    def first_state(self) -> ModelState:
        """Returns the chief's initial values, or those of the checkpoint to begin from."""
        self._storage.open(self._lifecycle.view_number)
        checkpoint = self._find()
        if checkpoint is None:
            self._lifecycle.enter("initialising")
            state = self._own_state()
        else:
            self._lifecycle.enter("restoring", f"step {checkpoint.step}")
            self.restored_from = checkpoint.step
            state = self._restore(checkpoint)
        self.buffers.hand_out(self._lifecycle.view_number)
        return state

    def state_again(self) -> ModelState:
        """Returns the newest undamaged checkpoint's values, as the servers have lost theirs."""
        self._storage.settle()
        resume = self._setup.settings.options.resume
        checkpoint = self._newest() if resume == "never" else self._find()
        # Started again, with the others, this worker could go on in both cases.
        if checkpoint is None:
            raise RolledBack(
                "all copies of a part of the parameters were lost before the first checkpoint, and "
                "with them the job: start it again (--max-restarts starts its workers again)",
                0,
            )
        if added := self._setup.flat.parameters.keys() - shapes_of(checkpoint.model).keys():
            raise JobFailed(
                f"the servers' values are lost, and the newest checkpoint, of step "
                f"{checkpoint.step}, is of a time before the optimizer was given "
                f"{', '.join(sorted(added))}"
            )
        state = self._restore(checkpoint)
        self.buffers.hand_out(self._lifecycle.view_number)
        return state

    def _own_state(self) -> ModelState:
        flat = self._setup.flat
        flat.collect_values()
        own = {} if self._setup.lean else flat.parameters  # every process has its values
        values = {name: p.detach().cpu() for name, p in own.items()}
        if not self._setup.settings.task.servers or self._setup.outer is not None:
            return ModelState(0, values)
        # What the program has loaded into its optimizer, whose steps the servers go on with.
        return ModelState(0, values, optimizer=export_state(self._setup.optimizer, flat.parameters))

    def take_first(self) -> None:
        self.buffers.take()  # the chief too: one that was started again has given none
        step = self._backend.global_step
        if not self._backend.take_state() and step:
            self._progress.message(
                f"this worker's optimizer begins with fresh state at step {step}"
            )
        self.buffers.spread()

    def _find(self) -> CheckpointData | None:
        resume, run_dir = self._setup.settings.options.resume, self._setup.settings.home
        if resume not in ("auto", "never"):
            newest, job = self._newest(), self._setup.settings.task.job
            state = {} if newest is None else newest.state
            if state.get("job") == job != BY_HAND or state.get("epoch") == self._lifecycle.epoch:
                return newest  # the job was started again, or goes back, and has saved since
            return load(resume, streamed=self._backend.streams)
        if resume == "never" and run_dir is not None and list_checkpoints(run_dir):
            raise ConfigurationError(
                f"{run_dir} has checkpoints and resume is 'never': choose another run directory, "
                "or move them away"
            )
        return self._newest()

    def _newest(self) -> CheckpointData | None:
        run_dir, warn = self._setup.settings.home, self._progress.warn
        if run_dir is None:
            return None
        return latest(
            run_dir,
            lambda path, why: warn(f"passing over the checkpoint {path}: {why}"),
            streamed=self._backend.streams,
        )

    def _restore(self, data: CheckpointData) -> ModelState:
        flat = self._setup.flat
        data = converted(data)
        check_model(data, flat.parameters, state_of(self._setup.model))
        then = job_state(data)
        tables = shapes_of(data.tables)
        if (extension := self._backend.extension) is not None:
            extension.check(data.step, tables, then.tables)
        elif any(map(len, tables.values())):
            raise CheckpointError(
                f"the checkpoint of step {data.step} has sparse tables, and the program has none. "
                "Choose another run directory, or give them as they were"
            )
        if then.lacks:
            lacks = ", ".join(then.lacks)
            self._progress.warn(
                f"the checkpoint of step {data.step} lacks {lacks}: these begin anew"
            )
        self.buffers.set_constants(data.model)
        self.known_kept = then.states
        for name, value in then.states.items():
            self._backend.share(f"kept/{name}", value)
        if warning := self._backend.hand_out_states(data, then, self._setup.settings.task.workers):
            self._progress.warn(warning)
        # The chief hands out frozen parameters as constants, unless it does not hold them.
        held = named_parameters(self._setup.model) if self._setup.lean else flat.parameters.items()
        return ModelState(
            step=data.step,
            values=renamed(data.model, {name: name for name, _ in held}),
            average=data.average,
            optimizer=self._optimizer_of(data, then),
            workers=then.pushes,
            sizes=dict(then.sizes),
            orders=dict(then.orders),
            consumed=then.spans,
            extra=data.tables,
        )

    def _optimizer_of(self, data: CheckpointData, then: JobState) -> Mapping[str, torch.Tensor]:
        now = _applied(self._setup.outer)
        if now == then.applies:
            return data.optimizer
        if then.applies != "gradients" and (data.optimizer or self._setup.outer is None):
            self._progress.warn(
                f"the checkpoint is of a job whose servers applied {then.applies}, and here they "
                f"apply {now}: their optimizer begins with fresh state"
            )
        return {}

    def follow_view(self) -> None:
        """Takes the run directory if this worker is chief, and releases it otherwise."""
        self._view = self._lifecycle.view
        self._storage.follow(self._lifecycle.view_number, chief=self._lifecycle.is_chief)

    def _follow_new_view(self) -> None:
        if self._lifecycle.view is not self._view:
            self.follow_view()

    def ask_all(self) -> None:
        """Requests to save the next step if it is due, where all workers take part in saving."""
        backend = self._backend
        if backend.saves is not None:
            due = self._lifecycle.is_chief and self._storage.due(backend.global_step + 1)
            backend.wants_save = due

    def step_made(self, *, exchanged: bool) -> None:
        """Saves the step if it is due; handles a new view.

        Workers that train locally share their optimizers' states right after the exchange whose
        step is saved: after the next one all have done so, and the copy is written.
        """
        storage, backend = self._storage, self._backend
        self._follow_new_view()
        if not storage.scheduled:
            return
        if exchanged:
            self._write()
        storage.look()
        agreed = backend.saves
        wanted = storage.due(backend.global_step) if agreed is None else agreed
        # The last step is saved with what the workers share at their end.
        if wanted and not backend.stopping and (self._lifecycle.is_chief or backend.together):
            self._copy()
        if not backend.trains_locally:
            self._write()

    def save_due(self, step: int) -> None:
        """Saves as chief, if it is due, while other workers train and this one waits for them."""
        storage = self._storage
        self._follow_new_view()
        if not (storage.scheduled and self._lifecycle.is_chief):
            return
        storage.look()
        if storage.due(step):
            self._copy()
            self._write()

    def save(self) -> None:
        self._backend.leave_state()
        self._copy()
        self._write()

    def _copy(self, *, last: bool = False) -> None:
        """Copies a consistent state; one that is streamed is written before this returns."""
        if not self._storage.scheduled:
            return
        self._write()
        if self._backend.together:  # else the chief has what the others shared last
            self.buffers.publish()
        with self._lifecycle.liveness.excused("it saves"), self._backend.saving() as state:
            if not self._lifecycle.is_chief:  # it only takes part
                return
            check_replaced(self._setup)
            self._storage.begun(state.step)
            if state.step != self._storage.submitted:
                self._copied = self._checkpoint_of(state)
                if self._backend.streams:  # while the other processes send their tensors
                    self._write(last=last)
                    self._storage.settle()

    def _write(self, *, last: bool = False) -> None:
        data = self._copied
        if data is None:
            return
        self._copied = None
        data = replace(data, local=self._backend.states(data.step))
        self._storage.submit(data, self._lifecycle.view_number, last=last)

    def finish(self) -> None:
        self.buffers.settle()
        if self._lifecycle.is_chief and self._setup.settings.run_dir is not None:
            self._lifecycle.enter("saving")
            self._write()
            self._storage.settle()
            self._backend.leave_state()
            self._copy(last=True)
            self._write(last=True)
        elif self._backend.streams:
            self._copy()  # sends this process's part

    def fail(self, error: BaseException) -> None:
        """Says what is lost if a server was lost, and adds that to the error."""
        lifecycle = self._lifecycle
        lost = lifecycle.lost_with(error)
        with_server = lost.startswith(("ps:", "coordinator:"))
        if with_server and not lifecycle.left and isinstance(error, JobFailed | WireError):
            copies = lifecycle.task.config.tasks.replicas
            error.loss = self._storage.loss(lost, self._backend.global_step, copies)
            if lifecycle.is_chief:
                self._progress.warn(error.loss)

    def _checkpoint_of(self, state: ModelState) -> CheckpointData:
        """Returns a checkpoint of a state, complete but for the workers' own optimizers."""
        lacks = list(state.lacks)
        consumed: dict[str, list[list[int]]] = {}  # positions by data set
        for span in state.consumed:
            consumed.setdefault(span.dataset, []).append([span.start, span.stop])
        described = {
            **self._described(),
            "consumed": consumed,
            "sizes": dict(state.sizes),
            "orders": dict(state.orders),
            "pushes": [msgspec.to_builtins(row) for row in state.workers],
        }
        if kept := self.kept():
            described["kept"] = kept
        constants = self.buffers.constants()
        # Only what `state_dict` has: not the model's non-persistent buffers.
        averages = {n: mean for n, mean in self.buffers.average().items() if n in constants}
        tied = renamed(state.values, self._aliases(state.values))
        data = CheckpointData(
            state.step,
            held("model", joined(constants, averages, state.values, tied), lacks),
            held("optimizer", state.optimizer, lacks),
            state.average,
            described,
            tables=state.extra,
        )
        if lacks:
            described["lacks"] = lacks
            self._progress.warn(
                f"the checkpoint of step {data.step} is saved without {'; '.join(lacks)}. "
                "The values are in it. Please report this"
            )
        return data

    def _described(self) -> dict[str, Any]:
        setup, settings = self._setup, self._setup.settings
        extension = self._backend.extension
        return {
            "job": settings.task.job,
            "epoch": self._lifecycle.epoch,
            "seed": settings.options.seed,
            "rule": msgspec.to_builtins(settings.rule),
            "applies": _applied(setup.outer),
            "workers": settings.task.workers,
            "servers": settings.task.servers,
            "optimizer": ", ".join(
                name_of(each) or type(each).__name__ for each in members(setup.optimizer)
            ),
            "tables": {} if extension is None else extension.described(),
            "groups": [
                {k: v for k, v in group.items() if isinstance(v, (int, float, bool, str))}
                for group in setup.optimizer.param_groups
            ],
        }

    def _aliases(self, values: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Returns the further names of tied parameters, each with the name that values have."""
        own = {id(p): name for name, p in named_parameters(self._setup.model) if name in values}
        everything = state_of(self._setup.model).items()
        return {n: own[id(t)] for n, t in everything if id(t) in own and n not in values}


def _applied(outer: OptimizerSpec | None) -> str:
    """Returns what servers apply, in the words that checkpoints store."""
    if outer is None:
        return "gradients"
    momentum = any(group.values.get("momentum") for group in outer.groups)
    return "deltas by momentum" if momentum else "deltas"

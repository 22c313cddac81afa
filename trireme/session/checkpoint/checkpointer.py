"""Finds the checkpoint that a job begins from, and assembles the checkpoints that it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from trireme.errors import CheckpointError, ConfigurationError, TriremeError
from trireme.ps.joint_optimizer import members
from trireme.ps.messages import OptimizerSpec, Span
from trireme.ps.module_names import state_of
from trireme.ps.optimizers import name_of
from trireme.ps.snapshot import ModelState, lacking
from trireme.session.backends.local_optimizers import LocalOptimizers
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints, load, step_of
from trireme.session.checkpoint.tensors import dtype_name
from trireme.session.observers.progress import Progress
from trireme.session.replica.buffers import Buffers
from trireme.session.training_setup import TrainingSetup

__all__ = ["LACKS", "Checkpointer"]

LACKS = "lacks"
"""The entry of a checkpoint's state that lists, in words, the parts that it lacks."""

_T = TypeVar("_T")


class Checkpointer:
    """Finds the checkpoint of a job, restores from it, and describes the job in the next one.

    `WorkerCheckpoints` decides when a checkpoint is saved, and by which worker.

    Args:
        setup: what is trained.
        buffers: the buffers and frozen parameters of the model.
        progress: is warned of what a checkpoint lacks.
        epoch: the epoch of this start of the job.
    """

    def __init__(
        self, setup: TrainingSetup, buffers: Buffers, progress: Progress, epoch: str
    ) -> None:
        self._setup = setup
        self._buffers = buffers
        self._progress = progress
        self._epoch = epoch

    # -- finding --------------------------------------------------------------------------------

    def find(self) -> CheckpointData | None:
        """Returns the checkpoint to begin from: the named one, or the newest undamaged one.

        Raises:
            CheckpointError: the named checkpoint cannot be read.
            ConfigurationError: the run directory has checkpoints that conflict with `resume`.
        """
        resume, run_dir = self._setup.settings.options.resume, self._setup.settings.run_dir
        if resume not in ("auto", "never"):
            return self._named(Path(resume))
        if run_dir is None:
            return None
        if resume == "never":
            if list_checkpoints(run_dir):
                raise ConfigurationError(
                    f"{run_dir} has checkpoints and resume is 'never': choose another run "
                    "directory, or move them away"
                )
            return None
        warn = self._progress.warn
        return latest(run_dir, lambda path, why: warn(f"passing over the checkpoint {path}: {why}"))

    def _named(self, path: Path) -> CheckpointData:
        data, run_dir = load(path), self._setup.settings.run_dir
        if run_dir is not None and any(step_of(p) > data.step for p in list_checkpoints(run_dir)):
            raise ConfigurationError(
                f"{run_dir} has checkpoints newer than step {data.step} of {path}, and the next "
                "resume would pick those: choose another run directory for what begins there"
            )
        return data

    # -- restoring ------------------------------------------------------------------------------

    def restore(self, data: CheckpointData, local: LocalOptimizers | None) -> ModelState:
        """Returns the state of the servers from a checkpoint, and restores this worker's part.

        Args:
            data: the checkpoint.
            local: the optimizers of workers that train locally; None where none do.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        flat = self._setup.flat
        missing = [name for name in flat.parameters if name not in data.model]
        if missing:
            raise CheckpointError(
                f"the checkpoint of step {data.step} has no parameter {missing[0]!r}: it is of "
                "another model; choose another run directory"
            )
        lacking = data.state.get(LACKS)
        if lacking:
            self._progress.warn(
                f"the checkpoint of step {data.step} holds values without {', '.join(lacking)}: "
                "these begin anew"
            )
        self._buffers.set_constants(data.model)
        if local is not None:
            self._hand_out_local_state(data, local)
        return ModelState(
            step=data.step,
            values={name: data.model[name] for name in flat.parameters},
            average=dict(data.average),
            optimizer=self._optimizer_of(data),
            sizes=dict(data.state.get("sizes", {})),
            consumed=tuple(
                Span(name, start, stop)
                for name, ranges in data.state.get("consumed", {}).items()
                for start, stop in ranges
            ),
        )

    def _optimizer_of(self, data: CheckpointData) -> dict[str, torch.Tensor]:
        """Returns the state with which the servers' optimizer continues."""
        now = _applied(self._setup.outer)
        then = data.state.get("applies", "gradients")
        if now == then:
            return dict(data.optimizer)
        if then != "gradients" and (data.optimizer or self._setup.outer is None):
            self._progress.warn(
                f"the checkpoint is of a job whose servers applied {then}, and here they apply "
                f"{now}: their optimizer begins with fresh state"
            )
        return {}

    def _hand_out_local_state(self, data: CheckpointData, local: LocalOptimizers) -> None:
        """Shares with each worker the state of its optimizer."""
        count, then = self._setup.settings.task.workers, data.state.get("workers")
        workers = range(count)
        if data.state.get("applies", "gradients") == "gradients":
            # The servers ran the same optimizer before: every worker continues with its state.
            local.hand_out(data.step, {worker: dict(data.optimizer) for worker in workers})
        elif then == count:
            states: dict[int, dict[str, torch.Tensor]] = {worker: {} for worker in workers}
            for name, tensor in data.local.items():
                worker, _, key = name.partition("/")
                states[int(worker)][key] = tensor
            local.hand_out(data.step, states)
        else:
            self._progress.warn(
                f"the checkpoint has the optimizers of {then} workers, and this job has "
                f"{count}: each worker's optimizer begins with fresh state"
            )

    # -- describing -----------------------------------------------------------------------------

    def checkpoint_of(
        self, state: ModelState, more: Mapping[str, Any] | None = None
    ) -> CheckpointData:
        """Returns a checkpoint of a state, complete but for the workers' own optimizers.

        Args:
            state: the state of the servers.
            more: further entries of the checkpoint's `state`, which replace the usual ones. If
                given, the servers are gone, and the buffers of other workers cannot be collected.
        """
        parts = _Parts(state.lacks)
        described = parts.get("how the job was launched", self._described)
        described |= {"epoch": self._epoch, "consumed": _ranges(state.consumed)}
        described |= {"sizes": dict(state.sizes), **(more or {})}
        constants = parts.get("buffers and frozen parameters", self._buffers.constants)
        # Only what `state_dict` has: not the model's non-persistent buffers.
        means = {} if more else parts.get("the mean of the buffers", self._buffers.average)
        averages = {name: mean for name, mean in means.items() if name in constants}
        aliases = parts.get("the further names of tied parameters", self._aliases)
        tied = {name: state.values[first] for name, first in aliases.items()}
        described["pushes"] = [msgspec.to_builtins(row) for row in state.workers]
        data = CheckpointData(
            state.step,
            parts.held("model", {**constants, **averages, **state.values, **tied}),
            parts.held("optimizer", state.optimizer),
            parts.held("average", state.average),
            described,
        )
        return self._say_lacking(data, parts)

    def _say_lacking(self, data: CheckpointData, parts: _Parts) -> CheckpointData:
        """Returns a checkpoint that lists the parts that it lacks; warns of them."""
        if not parts.lacks:
            return data
        self._progress.warn(
            f"the checkpoint of step {data.step} is saved without {'; '.join(parts.lacks)}. The "
            "values are in it. Please report this"
        )
        lacks = [*data.state.get(LACKS, ()), *parts.lacks]
        return replace(data, state={**data.state, LACKS: lacks})

    def with_local(self, data: CheckpointData, optimizers: LocalOptimizers) -> CheckpointData:
        """Returns a checkpoint with the state of the workers' own optimizers."""
        parts = _Parts(())
        local = parts.get("the workers' optimizers", lambda: optimizers.states(data.step))
        return self._say_lacking(replace(data, local=parts.held("local", local)), parts)

    def _described(self) -> dict[str, Any]:
        """Returns a checkpoint's description of the job, as JSON values."""
        setup, settings = self._setup, self._setup.settings
        return {
            "job": settings.task.job,
            "seed": settings.options.seed,
            "rule": msgspec.to_builtins(settings.rule),
            "applies": _applied(setup.outer),
            "workers": settings.task.workers,
            "servers": settings.task.servers,
            "optimizer": ", ".join(
                name_of(each) or type(each).__name__ for each in members(setup.optimizer)
            ),
            "groups": [
                {k: v for k, v in group.items() if isinstance(v, (int, float, bool, str))}
                for group in setup.optimizer.param_groups
            ],
        }

    def lost_with_servers(self) -> tuple[str, ...]:
        """Returns the parts of a checkpoint that only servers have, in words."""
        setup = self._setup
        lost = []
        if setup.outer is not None:
            lost.append("the state of the workers' optimizers")
        if _has_state(setup):
            lost.append("the optimizer's state")
        if setup.settings.rule.average is not None:
            lost.append("the moving average")
        return (*lost, "the record of the examples used since the checkpoint before")

    def _aliases(self) -> dict[str, str]:
        """Returns the further names of tied parameters, each with the name that is trained."""
        trained = {id(p): name for name, p in self._setup.flat.parameters.items()}
        return {
            name: trained[id(tensor)]
            for name, tensor in state_of(self._setup.model).items()
            if id(tensor) in trained and name not in self._setup.flat.parameters
        }


class _Parts:
    """Collects the parts of a checkpoint; parts that fail are left out and listed.

    The values are saved even if other parts fail.
    """

    def __init__(self, lacks: Sequence[str]) -> None:
        self.lacks = list(lacks)

    def get(self, what: str, make: Callable[[], dict[str, _T]]) -> dict[str, _T]:
        """Returns the result of `make`; {} where it fails with an error other than Trireme's."""
        try:
            return make()
        except TriremeError:
            raise
        except Exception as error:
            self.lacks.append(lacking(what, error))
            return {}

    def held(self, group: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the tensors that a checkpoint can hold."""
        good, odd = dict(tensors), []
        for name, tensor in tensors.items():
            try:
                dtype_name(name, tensor)
            except CheckpointError:
                odd.append(f"{name!r} of {tensor.dtype}")
                del good[name]
        if odd:
            self.lacks.append(f"what it cannot hold of the {group}: {', '.join(odd)}")
        return good


def _ranges(spans: Sequence[Span]) -> dict[str, list[list[int]]]:
    """Returns positions by data set, as JSON values."""
    ranges: dict[str, list[list[int]]] = {}
    for span in spans:
        ranges.setdefault(span.dataset, []).append([span.start, span.stop])
    return ranges


def _has_state(setup: TrainingSetup) -> bool:
    """Returns whether the servers' optimizer has state besides the values."""
    if setup.outer is not None:
        groups = [group.values for group in setup.outer.groups]
        plain = setup.outer.name == "SGD"
    else:
        groups = setup.optimizer.param_groups
        plain = type(setup.optimizer) is torch.optim.SGD
    return not plain or any(group.get("momentum") for group in groups)


def _applied(outer: OptimizerSpec | None) -> str:
    """Returns what servers apply, in the words that checkpoints store."""
    if outer is None:
        return "gradients"
    momentum = any(group.values.get("momentum") for group in outer.groups)
    return "deltas by momentum" if momentum else "deltas"

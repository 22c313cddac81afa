"""Which checkpoint a job begins from, and what of a job is in the ones that it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from trireme.errors import CheckpointError, ConfigurationError, TriremeError
from trireme.launch.detect import TaskConfig
from trireme.ps.joint import members
from trireme.ps.messages import OptimizerSpec, Span
from trireme.ps.names import own_name, state_of
from trireme.ps.optim import name_of
from trireme.ps.snapshot import ModelState, lacking
from trireme.session.averager import Averager
from trireme.session.buffers import Buffers
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints, load, step_of
from trireme.session.checkpoint.tensors import can_hold
from trireme.session.progress import Progress
from trireme.session.rescue import LACKS
from trireme.session.training import Training

__all__ = ["Checkpointer"]

_T = TypeVar("_T")


class Checkpointer:
    """Finds the checkpoint of a job, restores from it, and describes the job in the next one.

    When one is saved, and by whom, is the supervisor's business.

    Args:
        task: who this process is.
        training: what is trained.
        buffers: what is not.
        progress: warned of what a checkpoint lacks.
        epoch: which start of the job this is.
    """

    def __init__(
        self,
        task: TaskConfig,
        training: Training,
        buffers: Buffers,
        progress: Progress,
        epoch: str,
    ) -> None:
        self._task = task
        self._training = training
        self._buffers = buffers
        self._progress = progress
        self._epoch = epoch

    # -- finding --------------------------------------------------------------------------------

    def find(self) -> CheckpointData | None:
        """Returns the checkpoint to begin from, the newest good one unless another is named.

        Raises:
            CheckpointError: the one that is named cannot be read.
            ConfigurationError: the run directory has checkpoints, and they are in the way.
        """
        resume, run_dir = self._training.options.resume, self._training.run_dir
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
        return latest(run_dir, self._say_damaged)

    def _named(self, path: Path) -> CheckpointData:
        data, run_dir = load(path), self._training.run_dir
        if run_dir is not None and any(step_of(p) > data.step for p in list_checkpoints(run_dir)):
            raise ConfigurationError(
                f"{run_dir} has checkpoints newer than step {data.step} of {path}, and the next "
                "resume would pick those: choose another run directory for what begins there"
            )
        return data

    def _say_damaged(self, path: Path, error: CheckpointError) -> None:
        self._progress.warn(f"passing over the checkpoint {path}: {error}")

    # -- restoring ------------------------------------------------------------------------------

    def restore(self, data: CheckpointData, averager: Averager | None) -> ModelState:
        """Returns the state with which the servers go on; the rest is put in its place.

        Args:
            data: the checkpoint.
            averager: hands out the optimizers of workers that train by themselves; None where
                they do not.

        Raises:
            CheckpointError: it is of another model.
        """
        flat, data = self._training.flat, _by_own_names(data)
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
                "from here these begin anew"
            )
        self._buffers.set_constants(data.model)
        if averager is not None:
            self._hand_out_local_state(data, averager)
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
        """Returns the state of a checkpoint with which the servers' optimizer goes on."""
        now = _applied(self._training.outer)
        then = data.state.get("applies", "gradients")
        if now == then:
            return dict(data.optimizer)
        if then != "gradients" and (data.optimizer or self._training.outer is None):
            self._progress.warn(
                f"the checkpoint is of a job whose servers applied {then}, and here they apply "
                f"{now}: their optimizer begins with fresh state"
            )
        return {}

    def _hand_out_local_state(self, data: CheckpointData, averager: Averager) -> None:
        """Leaves each worker the state of its own optimizer."""
        workers, then = range(self._task.workers), data.state.get("workers")
        if data.state.get("applies", "gradients") == "gradients":
            # Until now the servers ran the same optimizer: every worker goes on from there.
            averager.hand_out(data.step, {worker: dict(data.optimizer) for worker in workers})
        elif then == self._task.workers:
            states: dict[int, dict[str, torch.Tensor]] = {worker: {} for worker in workers}
            for name, tensor in data.local.items():
                worker, _, key = name.partition("/")
                states[int(worker)][key] = tensor
            averager.hand_out(data.step, states)
        else:
            self._progress.warn(
                f"the checkpoint has the optimizers of {then} workers, and this job has "
                f"{self._task.workers}: each worker's optimizer begins with fresh state"
            )

    # -- describing -----------------------------------------------------------------------------

    def checkpoint_of(
        self, state: ModelState, more: Mapping[str, Any] | None = None
    ) -> CheckpointData:
        """Returns a checkpoint of a state, with all that goes with it but workers' optimizers.

        Args:
            state: of the servers.
            more: entries of the checkpoint's state beside, or in place of, the usual ones. With
                any, there are no servers left to ask for the other workers' buffers.
        """
        parts = _Parts(state.lacks)
        described = parts.get("how the job was launched", self._described)
        described |= {"epoch": self._epoch, "consumed": _ranges(state.consumed)}
        described |= {"sizes": dict(state.sizes), **(more or {})}
        constants = parts.get("buffers and frozen parameters", self._buffers.constants)
        # Only what `state_dict` has: not the buffers that the model does not want saved.
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
        """Returns a checkpoint that names what it lacks; says so aloud."""
        if not parts.lacks:
            return data
        self._progress.warn(
            f"the checkpoint of step {data.step} is saved without {'; '.join(parts.lacks)}. The "
            "values are in it. Please report this"
        )
        lacks = [*data.state.get(LACKS, ()), *parts.lacks]
        return replace(data, state={**data.state, LACKS: lacks})

    def with_local(self, data: CheckpointData, averager: Averager) -> CheckpointData:
        """Returns a checkpoint with the state of the workers' own optimizers."""
        parts = _Parts(())
        local = parts.get("the workers' optimizers", lambda: averager.states(data.step))
        return self._say_lacking(replace(data, local=parts.held("local", local)), parts)

    def _described(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the job, in JSON's terms."""
        task, training = self._task, self._training
        return {
            "job": task.job,
            "seed": training.options.seed,
            "rule": msgspec.to_builtins(training.rule),
            "applies": _applied(training.outer),
            "workers": task.workers,
            "servers": task.servers,
            "optimizer": ", ".join(
                name_of(each) or type(each).__name__ for each in members(training.optimizer)
            ),
            "groups": [
                {k: v for k, v in group.items() if isinstance(v, (int, float, bool, str))}
                for group in training.optimizer.param_groups
            ],
        }

    def lost_with_servers(self) -> tuple[str, ...]:
        """Returns what no worker has of what a checkpoint should hold, in words."""
        training = self._training
        lost = []
        if training.outer is not None:
            lost.append("the state of the workers' optimizers")
        if _has_state(training):
            lost.append("the optimizer's state")
        if training.rule.average is not None:
            lost.append("the moving average")
        return (*lost, "the record of the examples used since the checkpoint before")

    def _aliases(self) -> dict[str, str]:
        """Returns the further names of tied parameters, and under which each is trained."""
        trained = {id(p): name for name, p in self._training.flat.parameters.items()}
        return {
            name: trained[id(tensor)]
            for name, tensor in state_of(self._training.model).items()
            if id(tensor) in trained and name not in self._training.flat.parameters
        }


class _Parts:
    """Collects what goes into a checkpoint: what cannot be had or held is left out, and named.

    The values shall be saved, whatever fails beside them.
    """

    def __init__(self, lacks: Sequence[str]) -> None:
        self.lacks = list(lacks)

    def get(self, what: str, make: Callable[[], dict[str, _T]]) -> dict[str, _T]:
        """Returns what `make` returns; nothing where it fails otherwise than by a lost job."""
        try:
            return make()
        except TriremeError:
            raise
        except Exception as error:
            self.lacks.append(lacking(what, error))
            return {}

    def held(self, group: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns those tensors that a checkpoint can hold."""
        good = {name: tensor for name, tensor in tensors.items() if can_hold(name, tensor)}
        odd = [
            f"{name!r} of {tensor.dtype}" for name, tensor in tensors.items() if name not in good
        ]
        if odd:
            self.lacks.append(f"what it cannot hold of the {group}: {', '.join(odd)}")
        return good


def _ranges(spans: Sequence[Span]) -> dict[str, list[list[int]]]:
    """Returns positions by data set, in JSON's terms."""
    ranges: dict[str, list[list[int]]] = {}
    for span in spans:
        ranges.setdefault(span.dataset, []).append([span.start, span.stop])
    return ranges


def _by_own_names(data: CheckpointData) -> CheckpointData:
    """Returns a checkpoint without the names that `torch.compile` makes: earlier ones have them."""

    def named(group: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {own_name(name): tensor for name, tensor in group.items()}

    return replace(
        data,
        model=named(data.model),
        optimizer=named(data.optimizer),
        average=named(data.average),
        local=named(data.local),
    )


def _has_state(training: Training) -> bool:
    """Whether the servers' optimizer goes on from more than the values."""
    if training.outer is not None:
        groups = [group.values for group in training.outer.groups]
        plain = training.outer.name == "SGD"
    else:
        groups = training.optimizer.param_groups
        plain = type(training.optimizer) is torch.optim.SGD
    return not plain or any(group.get("momentum") for group in groups)


def _applied(outer: OptimizerSpec | None) -> str:
    """Returns what servers apply, in words that a checkpoint keeps."""
    if outer is None:
        return "gradients"
    momentum = any(group.values.get("momentum") for group in outer.groups)
    return "deltas by momentum" if momentum else "deltas"

"""Assembles a model with its optimizer, split as the launch requests, and its computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trireme.data.seeds import derive
from trireme.errors import ConfigurationError
from trireme.launch.environment.detect import TaskConfig
from trireme.parallel.reducer import Reducer
from trireme.ps.flat import FlatModel
from trireme.ps.joint_optimizer import JointOptimizer, members
from trireme.ps.rule import Rule
from trireme.session.options import Options
from trireme.session.replica.replica import Loss, Replica, named_groups
from trireme.session.resolved_settings import Optimizers, mesh_of, outer_of, prefetches
from trireme.session.result import Metric
from trireme.session.training_setup import TrainingSetup

if TYPE_CHECKING:
    from trireme.parallel.model_part import ModelPart
    from trireme.parallel.pipeline import Pipeline
    from trireme.parallel.process_group import ProcessGroup

__all__ = ["Assembly", "Computation", "assemble", "build_model", "computation_of", "device_of"]


_SEED_MODEL = 11


@dataclass(frozen=True)
class Assembly:
    """The model and the optimizer of a program, as this process holds them.

    Attributes:
        model: the whole model. Where processes hold parts of it, its values are those of the last
            evaluation.
        optimizer: the user's optimizer, over the parameters that this process updates.
        flat: the flat buffers of the whole model.
        process_group: the processes that hold the model together; None for one process.
        part: the part of this process; None where it holds the whole model.
        reducer: averages the gradients of all replicas; None for one process.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    flat: FlatModel
    process_group: ProcessGroup | None = None
    part: ModelPart | None = None
    reducer: Reducer | None = None

    @property
    def trained(self) -> FlatModel | ModelPart:
        """The trained parameters with which this process computes."""
        return self.flat if self.part is None else self.part

    def replica(self, task: TaskConfig) -> int:
        """Returns which of the job's `replicas` batches at a time is this process's, from 0."""
        if self.process_group is None:
            return task.index if task.servers else 0
        before = task.index * self.process_group.mesh.replicas if task.servers else 0
        return before + self.process_group.replica

    def replicas(self, task: TaskConfig) -> int:
        """Returns how many batches the job computes at a time."""
        inside = 1 if self.process_group is None else self.process_group.mesh.replicas
        return inside * (task.workers if task.servers else 1)

    def shows_progress(self, task: TaskConfig) -> bool:
        """Returns whether this process shows progress that no other process shows.

        In a worker of several processes of a job with servers, that is the leader alone.
        """
        group = self.process_group
        return group is None or (group.is_chief if task.servers else group.shows_progress)

    def parameters_of_each(self) -> list[list[nn.Parameter]]:
        """Returns the parameters of each optimizer, as the program computes with them."""
        names = {
            id(parameter): name
            for held in (self.flat, self.trained)
            for name, parameter in held.parameters.items()
        }
        return [
            [
                self.trained.parameters[names[id(parameter)]]
                for group in optimizer.param_groups
                for parameter in group["params"]
                if names.get(id(parameter)) in self.trained.parameters
            ]
            for optimizer in members(self.optimizer)
        ]

    def setup(
        self, task: TaskConfig, options: Options, rule: Rule, run_dir: Path | None
    ) -> TrainingSetup:
        """Returns the setup of a worker that trains the assembly."""
        return TrainingSetup(
            self.model,
            self.optimizer,
            self.flat,
            rule,
            options,
            run_dir,
            prefetch=prefetches(task, options),
            process_group=self.process_group,
            part=self.part,
            outer=outer_of(task, options, self.optimizer),
        )


@dataclass(frozen=True)
class Computation:
    """The objects with which a session computes gradients and evaluates.

    Attributes:
        replica: computes gradients.
        evaluator: computes with the whole model.
        pipeline: runs this process's pipeline stages; None where there are none.
    """

    replica: Replica
    evaluator: Replica
    pipeline: Pipeline | None = None


def device_of(task: TaskConfig, options: Options) -> torch.device | None:
    """Returns the device of the model; None leaves the model where it is.

    Processes that compute together each take a GPU of their own, if there are any; so do workers
    with the device `cuda` without an index.
    """
    if options.device is None and (task.processes == 1 or not torch.cuda.is_available()):
        return None
    device = torch.device("cuda" if options.device is None else options.device)
    several = task.processes > 1 or task.workers > 1
    if str(device) == "cuda" and several and torch.cuda.is_available():
        return torch.device("cuda", task.local_rank % torch.cuda.device_count())
    return device


def build_model(
    given: nn.Module | Callable[[], nn.Module], task: TaskConfig, options: Options
) -> nn.Module:
    """Returns a session's model on its device, in training mode.

    Args:
        given: the model, or a function that builds it. Initial values that the function draws
            follow from the seed.
        task: this process's task.
        options: the session's options.

    Raises:
        ConfigurationError: PyTorch has no such device here.
    """
    torch.manual_seed(derive(options.seed, _SEED_MODEL))
    model = given if isinstance(given, nn.Module) else given()
    device = device_of(task, options)
    if device is None:
        return model.train()
    try:
        return model.to(device).train()
    except (AssertionError, RuntimeError) as error:  # torch's, where it has no such device
        found = "no CUDA device" if not torch.cuda.is_available() else "CUDA devices"
        raise ConfigurationError(
            f"the model cannot be put on device {str(device)!r} ({error}): PyTorch finds {found} "
            "here; leave `device` out to train where the model is"
        ) from error


def build_optimizer(make: Optimizers, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the user's optimizer over a model's parameters; several become a joint optimizer.

    Raises:
        ConfigurationError: an object is not an optimizer, or cannot build one.
    """
    if isinstance(make, torch.optim.Optimizer):
        return make
    if isinstance(make, Mapping):
        _check_optimizer(make, bool(make), _ONE)
        return JointOptimizer([_named_optimizer(name, one, model) for name, one in make.items()])
    given: object = make
    if isinstance(given, (list, tuple)):
        _check_optimizer(given, bool(given), _ONE)
        for one in given:
            _check_optimizer(one, isinstance(one, torch.optim.Optimizer), _IN_A_LIST)
        return JointOptimizer(given)
    _check_optimizer(make, callable(make), _ONE)
    assert callable(make)
    return make(model.parameters())


_ONE = (
    "give a function that builds one from the parameters, such as "
    "lambda params: torch.optim.Adam(params), or an optimizer; or several, in a list or a dict"
)
_IN_A_LIST = "give optimizers in a list; functions that build them go by name, in a dict"
_BY_NAME = "give an optimizer, or a function that builds one from the parameters of"


def _named_optimizer(name: str, make: object, model: nn.Module) -> torch.optim.Optimizer:
    """Returns one of several; a function builds it from the parameters of the child of its name."""
    if isinstance(make, torch.optim.Optimizer):
        return make
    _check_optimizer(make, callable(make), f"{_BY_NAME} the model's child {name!r}")
    assert callable(make)
    child = dict(model.named_children()).get(name)
    if child is None:
        children = ", ".join(repr(each) for each, _ in model.named_children())
        raise ConfigurationError(
            f"the optimizer {name!r} is a function, which builds one from the parameters of the "
            f"model's child of that name, and the model has {children or 'no children'}: call it "
            "by the name of a child, or give an optimizer"
        )
    optimizer: torch.optim.Optimizer = make(child.parameters())
    return optimizer


def _check_optimizer(found: object, good: bool, instead: str) -> None:
    if not good:
        raise ConfigurationError(f"the optimizer is {found!r}: {instead}")


def assemble(
    task: TaskConfig,
    options: Options,
    make_model: Callable[[], nn.Module],
    make_optimizer: Optimizers,
    *,
    in_place: bool = False,
    device: torch.device | None = None,
) -> Assembly:
    """Assembles the model and the optimizer; joins the process group where there is one.

    Args:
        task: the identity of this process.
        options: the session's options.
        make_model: returns the model, on its device.
        make_optimizer: the optimizer, a function that builds it, or several of these.
        in_place: whether the program's own loop computes with the model, so that the module itself
            is split, where the launch requests it, instead of a copy.
        device: the device of this process; None for that of `device_of`.

    Raises:
        ConfigurationError: the optimizer is invalid, or not over the model's parameters; or the
            model cannot be split.
        TriremeError: the other processes did not join.
    """
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    mesh = mesh_of(task, options)
    if mesh.size == 1 or task.dry_run:
        model = make_model()
        optimizer = build_optimizer(make_optimizer, model)
        flat = FlatModel(
            named_groups(model, optimizer),
            servers=max(task.servers, 1),
            shared=task.servers > 0,
            staged=prefetches(task, options),
        )
        return Assembly(model, optimizer, flat)
    from trireme.session.replica.process_group_assembly import (  # load slowly: process groups only
        assemble_together,
        meet,
    )

    process_group = meet(task, mesh, device or device_of(task, options) or torch.device("cpu"))
    try:
        model = make_model()
        optimizer = build_optimizer(make_optimizer, model)
        return assemble_together(task, options, process_group, model, optimizer, in_place=in_place)
    except BaseException:
        process_group.close(together=False)
        raise


def computation_of(
    assembly: Assembly, loss: Loss, options: Options, metrics: Mapping[str, Metric]
) -> Computation:
    """Returns the objects that compute an assembly's gradients and evaluate it.

    Raises:
        ConfigurationError: an option has no meaning for a pipeline.
    """
    if assembly.process_group is None:
        replica = Replica(assembly.model, loss, assembly.flat, options, metrics)
        return Computation(replica, replica)
    from trireme.session.replica.process_group_assembly import compute_together

    return compute_together(assembly, loss, options, metrics)

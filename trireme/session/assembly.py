"""Puts together what a session trains: the model, cut as the launch asks, and what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.launch.detect import TaskConfig
from trireme.parallel.reducer import Reducer
from trireme.ps.dense import FlatModel
from trireme.ps.joint import JointOptimizer, members
from trireme.ps.rule import Rule
from trireme.session.options import Options
from trireme.session.replica import Loss, Replica, named_groups
from trireme.session.result import Metric
from trireme.session.rules import Optimizers, mesh_of, outer_of, prefetches
from trireme.session.training import Training

if TYPE_CHECKING:
    from trireme.parallel.gang import Gang
    from trireme.parallel.part import ModelPart
    from trireme.parallel.pipeline import Pipeline

__all__ = ["Assembly", "Computation", "assemble", "computation_of", "device_of"]


@dataclass(frozen=True)
class Assembly:
    """What a program trains, as this process holds it.

    Attributes:
        model: whole, as people and checkpoints know it. Where processes hold parts of it, its
            values are those of the last evaluation.
        optimizer: the user's, over what this process updates.
        flat: the whole model's flat buffers.
        gang: the processes that hold the model with this one; None for one process.
        part: what this process holds; None where that is all.
        reducer: makes one gradient of those of all replicas; None where there is one process.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    flat: FlatModel
    gang: Gang | None = None
    part: ModelPart | None = None
    reducer: Reducer | None = None

    @property
    def trained(self) -> FlatModel | ModelPart:
        """The trained parameters that this process computes with."""
        return self.flat if self.part is None else self.part

    def parameters_of_each(self) -> list[list[nn.Parameter]]:
        """Returns, for each of the optimizers, the parameters with which the program computes."""
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

    def training(
        self, task: TaskConfig, options: Options, rule: Rule, run_dir: Path | None
    ) -> Training:
        """Returns what a supervisor is told of it."""
        return Training(
            self.model,
            self.optimizer,
            self.flat,
            rule,
            options,
            run_dir,
            prefetch=prefetches(task, options),
            gang=self.gang,
            part=self.part,
            outer=outer_of(task, options, self.optimizer),
        )


@dataclass(frozen=True)
class Computation:
    """What computes gradients and evaluates, where a session does it.

    Attributes:
        replica: computes gradients.
        evaluator: computes with the whole model.
        pipeline: what drives this process's stages; None without any.
    """

    replica: Replica
    evaluator: Replica
    pipeline: Pipeline | None = None


def device_of(task: TaskConfig, options: Options) -> torch.device | None:
    """Returns where the model goes; None leaves it where it is.

    Processes that compute together each take a GPU of their own, if there are any; so do workers
    that were told to take one, without saying which.
    """
    if options.device is None and (task.processes == 1 or not torch.cuda.is_available()):
        return None
    device = torch.device("cuda" if options.device is None else options.device)
    several = task.processes > 1 or task.workers > 1
    if str(device) == "cuda" and several and torch.cuda.is_available():
        return torch.device("cuda", task.local_rank % torch.cuda.device_count())
    return device


def build_optimizer(make: Optimizers, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the user's optimizer over a model's parameters; of several, one of them all.

    Raises:
        ConfigurationError: there is none, or several cannot be built.
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
    """Returns one of several: a function builds it from the parameters of the child of its name."""
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
    """Joins the processes that hold the model with this one, and puts together what is trained.

    Args:
        task: who this is.
        options: the session's.
        make_model: returns the model, on its device.
        make_optimizer: builds the optimizer from the model's parameters, or is it; or several.
        in_place: whether the program's own loop computes with the model: then it is that very
            module which is cut, where the launch asks for it, and not a copy.
        device: where this process computes; None as `device_of` has it.

    Raises:
        ConfigurationError: the optimizer is none, or not the model's; or the model cannot be cut.
        TriremeError: the others did not come.
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
    from trireme.session.gang_assembly import assemble_together, meet  # load slowly: gangs only

    gang = meet(task, mesh, device or device_of(task, options) or torch.device("cpu"))
    try:
        model = make_model()
        optimizer = build_optimizer(make_optimizer, model)
        return assemble_together(task, options, gang, model, optimizer, in_place=in_place)
    except BaseException:
        gang.close(together=False)
        raise


def computation_of(
    made: Assembly, loss: Loss, options: Options, metrics: Mapping[str, Metric]
) -> Computation:
    """Returns what computes an assembly's gradients, and what evaluates it.

    Raises:
        ConfigurationError: an option has no meaning for a pipeline.
    """
    if made.gang is None:
        replica = Replica(made.model, loss, made.flat, options, metrics)
        return Computation(replica, replica)
    from trireme.session.gang_assembly import compute_together

    return compute_together(made, loss, options, metrics)

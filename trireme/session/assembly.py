"""Puts together what a session trains: the model, cut as the launch asks, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.launch.detect import TaskConfig
from trireme.ps.dense import FlatModel
from trireme.session.options import Options
from trireme.session.replica import Loss, Replica, named_groups
from trireme.session.result import Metric
from trireme.session.rules import OptimizerFactory, prefetches

if TYPE_CHECKING:
    from trireme.parallel.gang import Gang
    from trireme.parallel.part import ModelPart
    from trireme.parallel.pipeline import Pipeline

__all__ = ["Assembly", "assemble", "build_optimizer", "check_optimizer", "device_of"]


@dataclass(frozen=True)
class Assembly:
    """What a session trains.

    Attributes:
        model: whole, as people and checkpoints know it. Where processes hold parts of it, its
            values are those of the last evaluation.
        optimizer: the user's, over what this process updates.
        flat: the whole model's flat buffers.
        replica: computes gradients.
        evaluator: computes with the whole model.
        gang: the processes that hold the model with this one; None for one process.
        part: what this process holds; None where that is all.
        pipeline: what drives its stages; None without any.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    flat: FlatModel
    replica: Replica
    evaluator: Replica
    gang: Gang | None = None
    part: ModelPart | None = None
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


def build_optimizer(
    make: OptimizerFactory | torch.optim.Optimizer, model: nn.Module
) -> torch.optim.Optimizer:
    """Returns the user's optimizer over all of a model's parameters."""
    return make if isinstance(make, torch.optim.Optimizer) else make(model.parameters())


def check_optimizer(make: OptimizerFactory | torch.optim.Optimizer) -> None:
    """Checks that there is an optimizer, or what builds one.

    Raises:
        ConfigurationError: it is neither.
    """
    if not isinstance(make, torch.optim.Optimizer) and not callable(make):
        raise ConfigurationError(
            f"the optimizer is {make!r}: give a function that builds one from the "
            "parameters, such as lambda params: torch.optim.Adam(params), or an optimizer"
        )


def assemble(
    task: TaskConfig,
    options: Options,
    model: nn.Module,
    loss: Loss,
    make_optimizer: OptimizerFactory | torch.optim.Optimizer,
    metrics: Mapping[str, Metric],
) -> Assembly:
    """Makes the optimizer, the buffers and the replica for a model that one process holds.

    Raises:
        ConfigurationError: the optimizer is none, or not the model's.
    """
    check_optimizer(make_optimizer)
    optimizer = build_optimizer(make_optimizer, model)
    flat = FlatModel(
        named_groups(model, optimizer),
        servers=max(task.servers, 1),
        shared=task.servers > 0,
        staged=prefetches(task, options),
    )
    replica = Replica(model, loss, flat, options, metrics)
    return Assembly(model, optimizer, flat, replica, replica)

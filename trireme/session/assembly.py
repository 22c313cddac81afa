"""Puts together what a session trains: the model, cut as the launch asks, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trireme.cluster.mesh import Mesh
from trireme.errors import ConfigurationError
from trireme.launch.detect import TaskConfig
from trireme.parallel.gang import Gang, GangConfig
from trireme.parallel.gradients import (
    BucketedMean,
    ListMean,
    NoMean,
    Reducer,
    ShardedMean,
)
from trireme.parallel.part import ModelPart
from trireme.ps.dense import FlatModel
from trireme.session.gang_replica import GangReplica, PipelineReplica
from trireme.session.options import Options
from trireme.session.replica import Loss, Replica, named_groups
from trireme.session.result import Metric
from trireme.session.rules import OptimizerFactory, mesh_of, part_of, prefetches

__all__ = ["Assembly", "assemble", "device_of", "meet"]


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
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    flat: FlatModel
    replica: Replica
    evaluator: Replica
    gang: Gang | None = None
    part: ModelPart | None = None


def device_of(task: TaskConfig, options: Options) -> torch.device | None:
    """Returns where the model goes; None leaves it where it is.

    Processes that compute together each take a GPU of their own, if there are any.
    """
    if options.device is not None:
        return torch.device(options.device)
    if task.processes > 1 and torch.cuda.is_available():
        return torch.device("cuda", task.local_rank % torch.cuda.device_count())
    return None


def meet(task: TaskConfig, options: Options) -> Gang | None:
    """Joins the processes that hold the model with this one; None where it is alone.

    Raises:
        ConfigurationError: the mesh does not fit the number of processes.
        TriremeError: the others did not come.
    """
    mesh = mesh_of(task, options)
    if mesh.size == 1:
        return None
    return Gang(
        GangConfig(
            mesh=mesh,
            rank=task.rank,
            address=task.gang,
            listen_fd=task.gang_fd,
            prefix=task.gang_prefix,
            device=device_of(task, options) or torch.device("cpu"),
            join_seconds=task.join_timeout,
        )
    )


def assemble(
    task: TaskConfig,
    options: Options,
    gang: Gang | None,
    model: nn.Module,
    loss: Loss,
    make_optimizer: OptimizerFactory | torch.optim.Optimizer,
    metrics: Mapping[str, Metric],
) -> Assembly:
    """Makes the optimizer, the buffers and the replica for a model.

    Raises:
        ConfigurationError: the model cannot be spread so, or the optimizer is none.
    """
    if not isinstance(make_optimizer, torch.optim.Optimizer) and not callable(make_optimizer):
        raise ConfigurationError(
            f"the optimizer is {make_optimizer!r}: give a function that builds one from the "
            "parameters, such as lambda params: torch.optim.Adam(params), or an optimizer"
        )
    if gang is not None and (gang.mesh.sharded or task.servers):
        return _in_parts(task, options, gang, model, loss, make_optimizer, metrics)
    optimizer = _optimizer(make_optimizer, model)
    groups = named_groups(model, optimizer)
    flat = FlatModel(
        groups,
        servers=max(task.servers, 1),
        shared=task.servers > 0,
        staged=prefetches(task, options),
    )
    if gang is None:
        replica = Replica(model, loss, flat, options, metrics)
        return Assembly(model, optimizer, flat, replica, replica)
    mean = BucketedMean(gang, flat.gradients, flat.placed)
    together = GangReplica(gang, model, loss, flat, options, metrics, mean)
    return Assembly(model, optimizer, flat, together, together, gang)


def _optimizer(
    make: OptimizerFactory | torch.optim.Optimizer, model: nn.Module
) -> torch.optim.Optimizer:
    return make if isinstance(make, torch.optim.Optimizer) else make(model.parameters())


def _in_parts(
    task: TaskConfig,
    options: Options,
    gang: Gang,
    model: nn.Module,
    loss: Loss,
    make_optimizer: OptimizerFactory | torch.optim.Optimizer,
    metrics: Mapping[str, Metric],
) -> Assembly:
    """As `assemble`, where each process holds less than the whole model."""
    if isinstance(make_optimizer, torch.optim.Optimizer) and not task.servers:
        raise ConfigurationError(
            f"the mesh {gang.mesh} cuts the model into parts with parameters of their own, and the "
            "optimizer was built over the whole: give the session a function that builds one, "
            "such as lambda params: torch.optim.Adam(params)"
        )
    part = ModelPart(gang, model, part_of(task, options))
    whole = _optimizer(make_optimizer, model)
    flat = FlatModel(
        named_groups(model, whole), servers=max(task.servers, 1), shared=task.servers > 0
    )
    if task.servers:
        optimizer = whole
    else:
        assert not isinstance(make_optimizer, torch.optim.Optimizer)
        optimizer = make_optimizer(list(part.parameters.values()))
        for group in optimizer.param_groups:
            if "foreach" in group:  # torch's many-tensor kernels take no mixture of shards
                group["foreach"] = False
    reducer = _reducer(gang, part)
    replica: GangReplica
    if gang.mesh.pp > 1:
        replica = PipelineReplica(gang, part, loss, options, metrics, reducer)
    else:
        replica = GangReplica(gang, part.modules[0], loss, part, options, metrics, reducer)
    evaluator = Replica(model, loss, flat, options, metrics)
    return Assembly(model, optimizer, flat, replica, evaluator, gang, part)


def _reducer(gang: Gang, part: ModelPart) -> Reducer:
    mesh: Mesh = gang.mesh
    if mesh.dp > 1 and mesh.fsdp == 1:
        return ListMean(gang, [p for p in part.parameters.values() if p.requires_grad])
    return NoMean() if mesh.replicas == 1 else ShardedMean(gang)

"""Puts together what a session trains where several processes hold the model together.

Whoever imports this loads `torch.distributed` with its shards and pipelines, which takes seconds:
only such sessions do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from trireme.cluster.mesh import Mesh
from trireme.errors import ConfigurationError
from trireme.launch.detect import TaskConfig
from trireme.parallel.gang import Gang, GangConfig
from trireme.parallel.gradients import BucketedMean, ListMean, ShardedMean
from trireme.parallel.part import ModelPart
from trireme.parallel.reducer import NoMean, Reducer
from trireme.ps.dense import FlatModel
from trireme.session.assembly import Assembly, build_optimizer, check_optimizer, device_of
from trireme.session.gang_replica import GangReplica, PipelineReplica
from trireme.session.options import Options
from trireme.session.replica import Loss, Replica, named_groups
from trireme.session.result import Metric
from trireme.session.rules import OptimizerFactory, part_of

__all__ = ["assemble_together", "meet"]


def meet(task: TaskConfig, options: Options, mesh: Mesh) -> Gang:
    """Joins the processes that hold the model with this one.

    Raises:
        TriremeError: the others did not come.
    """
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


def assemble_together(
    task: TaskConfig,
    options: Options,
    gang: Gang,
    model: nn.Module,
    loss: Loss,
    make_optimizer: OptimizerFactory | torch.optim.Optimizer,
    metrics: Mapping[str, Metric],
) -> Assembly:
    """Makes the optimizer, the buffers and the replica of one process of a gang.

    Raises:
        ConfigurationError: the model cannot be spread so, or the optimizer is none.
    """
    check_optimizer(make_optimizer)
    if gang.mesh.sharded or task.servers:
        return _in_parts(task, options, gang, model, loss, make_optimizer, metrics)
    optimizer = build_optimizer(make_optimizer, model)
    flat = FlatModel(named_groups(model, optimizer), servers=1)
    mean = BucketedMean(gang, flat.gradients, flat.placed)
    replica = GangReplica(gang, model, loss, flat, options, metrics, mean)
    return Assembly(model, optimizer, flat, replica, replica, gang)


def _in_parts(
    task: TaskConfig,
    options: Options,
    gang: Gang,
    model: nn.Module,
    loss: Loss,
    make_optimizer: OptimizerFactory | torch.optim.Optimizer,
    metrics: Mapping[str, Metric],
) -> Assembly:
    """As `assemble_together`, where each process holds less than the whole model."""
    if isinstance(make_optimizer, torch.optim.Optimizer) and not task.servers:
        raise ConfigurationError(
            f"the mesh {gang.mesh} cuts the model into parts with parameters of their own, and the "
            "optimizer was built over the whole: give the session a function that builds one, "
            "such as lambda params: torch.optim.Adam(params)"
        )
    part = ModelPart(gang, model, part_of(task, options))
    whole = build_optimizer(make_optimizer, model)
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

"""Puts together what a session trains where several processes hold the model together.

Whoever imports this loads `torch.distributed` with its shards and pipelines, which takes seconds:
only such sessions do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from trireme.cluster.mesh import Mesh
from trireme.errors import ConfigurationError
from trireme.launch.detect import TaskConfig
from trireme.parallel.gang import Gang, GangConfig
from trireme.parallel.gradients import BucketedMean, ListMean, ShardedMean
from trireme.parallel.part import ModelPart
from trireme.parallel.pipeline import Pipeline
from trireme.parallel.reducer import NoMean, Reducer
from trireme.ps.dense import FlatModel
from trireme.ps.layout import Layout
from trireme.ps.messages import LayoutSpec
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
    _check_same(task, gang, flat)
    mean = BucketedMean(gang, flat.gradients, flat.placed)
    replica = GangReplica(gang, model, loss, flat, options, metrics, mean)
    return Assembly(model, optimizer, flat, replica, replica, gang)


def _check_same(task: TaskConfig, gang: Gang, flat: FlatModel) -> None:
    """Checks that every process has built the model that the chief has.

    Raises:
        ModelMismatchError: this one has not; names the first parameter that differs.
    """
    own = flat.layout.spec
    said = gang.broadcast(msgspec.msgpack.encode(own) if gang.is_chief else None)
    chief = msgspec.structs.replace(task, rank=0, index=task.index if task.servers else 0)
    theirs = Layout(msgspec.msgpack.decode(said, type=LayoutSpec))
    theirs.check_same(flat.layout, whose=chief.name, others=task.name)


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
    whole = build_optimizer(make_optimizer, model)
    flat = FlatModel(
        named_groups(model, whole), servers=max(task.servers, 1), shared=task.servers > 0
    )
    _check_same(task, gang, flat)  # before parts are cut: those of other shapes would not fit
    part = ModelPart(gang, model, part_of(task, options))
    optimizer = whole if task.servers else _over_part(whole, model, part)
    reducer = _reducer(gang, part)
    replica: GangReplica
    pipeline: Pipeline | None = None
    if gang.mesh.pp > 1:
        replica = PipelineReplica(gang, part, loss, options, metrics, reducer)
        pipeline = replica.pipeline
    else:
        replica = GangReplica(gang, part.modules[0], loss, part, options, metrics, reducer)
    evaluator = Replica(model, loss, flat, options, metrics)
    return Assembly(model, optimizer, flat, replica, evaluator, gang, part, pipeline)


def _over_part(
    whole: torch.optim.Optimizer, model: nn.Module, part: ModelPart
) -> torch.optim.Optimizer:
    """Returns an optimizer like one over the whole model, group by group, over what is here of it.

    Raises:
        ConfigurationError: such a one cannot be built.
    """
    here = part.parameters
    groups: list[dict[str, Any]] = [
        {**options, "params": [here[name] for name, _ in named if name in here]}
        for options, named in zip(whole.param_groups, named_groups(model, whole), strict=True)
    ]
    kind: Callable[[Any], torch.optim.Optimizer] = type(whole)
    for group in groups:
        if "foreach" in group:  # torch's many-tensor kernels take no mixture of shards
            group["foreach"] = False
    try:
        return kind(groups)
    except TypeError as error:
        raise ConfigurationError(
            f"the model is cut into parts, and {type(whole).__name__} cannot be built over the "
            f"parameters of one from its groups alone ({error}): use an optimizer whose settings "
            "are all in its parameter groups, as torch's are"
        ) from error


def _reducer(gang: Gang, part: ModelPart) -> Reducer:
    mesh: Mesh = gang.mesh
    if mesh.dp > 1 and mesh.fsdp == 1:
        return ListMean(gang, [p for p in part.parameters.values() if p.requires_grad])
    if mesh.replicas == 1:
        return NoMean()
    # A pipeline says itself when its last micro-batch has passed.
    return ShardedMean(gang, () if mesh.pp > 1 else part.modules)

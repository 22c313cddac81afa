"""Puts together what a session trains where several processes hold the model together.

Whoever imports this loads `torch.distributed` with its shards and pipelines, which takes seconds:
only such sessions do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from trireme.cluster.mesh import Mesh
from trireme.launch.detect import TaskConfig
from trireme.parallel.gang import Gang, GangConfig
from trireme.parallel.gradients import BucketedMean, EqualShares, ListMean, ShardedMean
from trireme.parallel.part import ModelPart
from trireme.parallel.reducer import NoMean, Reducer
from trireme.parallel.sharding import take
from trireme.ps.dense import FlatModel
from trireme.ps.joint import members
from trireme.ps.layout import Layout
from trireme.ps.messages import LayoutSpec
from trireme.ps.names import named_parameters
from trireme.session.assembly import Assembly, Computation
from trireme.session.gang_replica import GangReplica, PipelineReplica
from trireme.session.options import Options
from trireme.session.replica import Loss, Replica, named_groups
from trireme.session.result import Metric
from trireme.session.rules import part_of

__all__ = ["assemble_together", "compute_together", "meet"]


def meet(task: TaskConfig, mesh: Mesh, device: torch.device) -> Gang:
    """Joins the processes that hold the model with this one, which computes on a device.

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
            device=device,
            join_seconds=task.join_timeout,
        )
    )


def assemble_together(
    task: TaskConfig,
    options: Options,
    gang: Gang,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    in_place: bool,
) -> Assembly:
    """Makes the buffers, and cuts the model, for one process of a gang.

    Args:
        task: who this is.
        options: the session's.
        gang: the processes.
        model: whole, on its device.
        optimizer: over its parameters; its groups, and its state, are those of the part of the
            model afterwards that is updated here.
        in_place: as for `assemble`.

    Raises:
        ConfigurationError: the model cannot be cut so.
        ModelMismatchError: this process has another model than the chief.
    """
    names = _names(model, optimizer)
    if not gang.mesh.sharded and not task.servers:
        flat = FlatModel(named_groups(model, optimizer), servers=1, counted=True)
        _check_same(task, gang, flat)
        mean = BucketedMean(gang, flat)
        return Assembly(model, optimizer, flat, gang, reducer=mean)
    whole, cut = model, None
    if in_place:
        whole, cut = copy.deepcopy(model), model
        _point(optimizer, names, dict(named_parameters(whole)))
    flat = FlatModel(
        named_groups(whole, optimizer), servers=max(task.servers, 1), shared=task.servers > 0
    )
    _check_same(task, gang, flat)  # before parts are cut: those of other shapes would not fit
    part = ModelPart(gang, whole, part_of(task, options), cut=cut)
    if not task.servers:
        _point(optimizer, names, part.parameters)
    reducer = _reducer(gang, part, in_place=in_place)
    return Assembly(whole, optimizer, flat, gang, part, reducer)


def compute_together(
    made: Assembly, loss: Loss, options: Options, metrics: Mapping[str, Metric]
) -> Computation:
    """Returns what computes the gradients of an assembly of several processes.

    Raises:
        ConfigurationError: an option has no meaning for a pipeline.
    """
    gang, part, reducer = made.gang, made.part, made.reducer
    assert gang is not None and reducer is not None
    if part is None:
        replica = GangReplica(gang, made.model, loss, made.flat, options, metrics, reducer)
        return Computation(replica, replica)
    evaluator = Replica(made.model, loss, made.flat, options, metrics)
    if gang.mesh.pp > 1:
        staged = PipelineReplica(gang, part, loss, options, metrics, reducer)
        return Computation(staged, evaluator, staged.pipeline)
    replica = GangReplica(gang, part.modules[0], loss, part, options, metrics, reducer)
    return Computation(replica, evaluator)


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


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Returns the names of the parameters in each group of an optimizer, frozen ones too."""
    named_groups(model, optimizer)  # refuses what is not the model's
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _point(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    here: Mapping[str, nn.Parameter],
) -> None:
    """Makes an optimizer one over other parameters of the same names, or shards of them.

    Its groups stay the same objects, so that what a program has built on them, such as a
    scheduler, goes on. What is not here leaves them.
    """
    left = iter(names)
    for member in members(optimizer):
        _point_one(member, [next(left) for _ in member.param_groups], here)


def _point_one(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    here: Mapping[str, nn.Parameter],
) -> None:
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group, named in zip(optimizer.param_groups, names, strict=True):
        found = [name for name in named if name in here]
        before = {name: p for name, p in zip(named, group["params"], strict=False)}
        for name in found:
            if before[name] in state:
                optimizer.state[here[name]] = _part_of_state(state[before[name]], here[name])
        group["params"][:] = [here[name] for name in found]
        if "foreach" in group:  # torch's many-tensor kernels take no mixture of shards
            group["foreach"] = False


def _part_of_state(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Returns what an optimizer knows of a parameter, for the part of it that is here."""
    part: dict[str, Any] = {}
    for key, value in state.items():
        part[key] = value
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape:
            part[key] = torch.zeros_like(parameter.detach(), dtype=value.dtype)
            take(part[key], value)
    return part


def _reducer(gang: Gang, part: ModelPart, *, in_place: bool) -> Reducer:
    mesh: Mesh = gang.mesh
    if mesh.dp > 1 and mesh.fsdp == 1:
        return ListMean(gang, [p for p in part.parameters.values() if p.requires_grad])
    if mesh.replicas == 1:
        return NoMean()
    if in_place:
        return EqualShares(gang)
    # A pipeline says itself when its last micro-batch has passed.
    return ShardedMean(gang, () if mesh.pp > 1 else part.modules)

"""Converts the parts of flat vectors that servers hold to named parameters, and back."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trireme.errors import CheckpointError
from trireme.ps.extension import EXTRA
from trireme.ps.flat import dtype_of
from trireme.ps.layout import Layout, Part, Placed
from trireme.ps.messages import Span, WorkerProgress
from trireme.ps.optimizers import COUNTERS, state_mismatch
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import Snapshot, TensorSpec


@dataclass(frozen=True)
class ModelState:
    """The state of a model by parameter name, the same under any number of servers."""

    step: int  # the global step
    values: Mapping[str, torch.Tensor]  # each parameter's value, in its shape
    # each parameter's moving average; empty where none is kept
    average: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # `PARAMETER/STATE` -> the optimizer's state, in the parameter's shape, or 0-dim
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    workers: tuple[WorkerProgress, ...] = ()  # the exactly-once table, of shard 0
    consumed: tuple[Span, ...] = ()  # the examples that are in the values
    # how many examples each data set has, by name, where that is known
    sizes: dict[str, int] = field(default_factory=dict)
    # the fingerprint of each data set's order, by name, where that is known
    orders: dict[str, int] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()  # what is missing, in words, each with the reason
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)  # extra values by name
    written: bool = False  # whether a program has written to the values since that step


def lacking(what: str, error: Exception) -> str:
    """Returns an entry of `ModelState.lacks`: what is missing, and the error that is the reason."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{what} ({type(error).__name__}: {error}{place})"


def assemble(layout: Layout, parts: Sequence[tuple[Snapshot, Tensors]]) -> ModelState:
    """Joins the snapshots of all shards, in their order.

    Args:
        parts: one snapshot a shard, all of one cut. Their extra values are left out.
    """
    first = parts[0][0]
    tensors = [entry for _, part in parts for entry in part]
    vectors = {vector.name: vector for vector in layout.vectors}
    flat: dict[tuple[str, str], tuple[torch.Tensor, list[TensorSpec]]] = {}
    named: dict[str, dict[str, torch.Tensor]] = {}
    for spec, tensor in tensors:
        if spec.key.startswith(EXTRA):
            continue
        if spec.group >= 0:
            scalar = tensor.detach().clone()
            for placed in vectors[spec.vector].placed:
                if placed.parameter.group == spec.group and _meets(spec, placed):
                    named.setdefault(spec.key, {})[placed.parameter.name] = scalar
            continue
        if (spec.key, spec.vector) not in flat:
            length = vectors[spec.vector].length
            flat[spec.key, spec.vector] = torch.zeros(length, dtype=tensor.dtype), []
        whole, covered = flat[spec.key, spec.vector]
        whole[spec.start : spec.stop] = tensor
        covered.append(spec)
    for (key, name), (whole, covered) in flat.items():
        for placed in vectors[name].placed:
            if any(_meets(spec, placed) for spec in covered):
                value = whole[placed.start : placed.stop].reshape(placed.parameter.shape).clone()
                named.setdefault(key, {})[placed.parameter.name] = value
    return ModelState(
        step=first.step,
        values=named.pop("values", {}),
        average=named.pop("average", {}),
        optimizer={
            f"{parameter}/{key.removeprefix('state/')}": tensor
            for key, tensors_by_name in named.items()
            for parameter, tensor in tensors_by_name.items()
        },
        workers=first.workers,
        consumed=first.consumed,
        sizes=first.sizes,
        orders=first.orders,
        written=any(part.written for part, _ in parts),
    )


def _meets(spec: TensorSpec, placed: Placed) -> bool:
    """Returns whether a range has some elements of a parameter, or the place of an empty one."""
    if placed.start == placed.stop:
        return spec.start <= placed.start <= spec.stop
    return spec.start < placed.stop and placed.start < spec.stop


def disassemble(layout: Layout, state: ModelState, shard: int, *, complete: bool = True) -> Tensors:
    """Returns the tensors of a state that one shard loads.

    Args:
        complete: whether it must have all values.
    """
    shapes = {p.name: p.shape for p in layout.spec.parameters}
    kinds = {"values": dict(state.values), "average": dict(state.average)}
    for name, tensor in state.optimizer.items():
        parameter, _, entry = name.rpartition("/")
        why = state_mismatch(entry, tensor, ()) if entry in COUNTERS else None
        if why is not None and parameter in shapes:
            raise CheckpointError(
                f"{entry!r} of parameter {parameter!r} {why} in the checkpoint: it is of another "
                "optimizer"
            )
        kinds.setdefault(f"state/{entry}", {})[parameter] = tensor
    tensors: list[tuple[TensorSpec, torch.Tensor]] = []
    for part in layout.parts(shard):
        for key, named in kinds.items():
            scalar = key.startswith("state/") and _is_scalar(key, named, shapes)
            if named and scalar:
                tensors += _scalars(key, part, named)
            elif named:
                tensors += _ranges(key, part, named, complete=complete)
    return tensors


def values_of(layout: Layout, values: Mapping[str, torch.Tensor], shard: int) -> Tensors:
    """Returns one shard's part of the values of some parameters."""
    return [
        found
        for part in layout.parts(shard)
        for found in _ranges("values", part, values, complete=False)
    ]


def _is_scalar(
    key: str, named: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    telling = [tensor for name, tensor in named.items() if shapes.get(name)]
    if not telling:  # of 0-dim parameters only: the shapes cannot tell
        return key.removeprefix("state/") in COUNTERS
    return all(tensor.dim() == 0 for tensor in telling)


def _ranges(
    key: str, part: Part, named: Mapping[str, torch.Tensor], *, complete: bool = True
) -> Tensors:
    """Returns one kind of tensor as ranges of a part, for the parameters that have it.

    An optimizer has no state for parameters that it has never updated. All other kinds must be
    `complete`.
    """
    found: list[tuple[TensorSpec, torch.Tensor]] = []
    for placed in part.vector.placed:
        name, shape = placed.parameter.name, placed.parameter.shape
        tensor = named.get(name)
        if tensor is None:
            if complete and not key.startswith("state/"):
                raise CheckpointError(
                    f"the checkpoint has no {key} of parameter {name!r}: it is of another model"
                )
            continue
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{key} of {name!r} has shape {tuple(tensor.shape)} in the checkpoint and {shape} "
                "in the model: it is of another model"
            )
        if within := placed.within(part.start, part.stop):
            kept = tensor.dtype if key.startswith("state/") else dtype_of(part.vector.dtype)
            whole = torch.zeros(placed.end - placed.start, dtype=kept)
            whole[: tensor.numel()] = tensor.reshape(-1)
            spec = _spec(key, part, whole, *within)
            found.append((spec, whole[within[0] - placed.start : within[1] - placed.start]))
    return found


def _scalars(key: str, part: Part, named: Mapping[str, torch.Tensor]) -> Tensors:
    return [
        (_spec(key, part, tensor, *within, placed.parameter.group), tensor.reshape(1))
        for placed in part.vector.placed
        if (tensor := named.get(placed.parameter.name)) is not None
        and (within := placed.within(part.start, part.stop))
    ]


def _spec(
    key: str, part: Part, tensor: torch.Tensor, start: int, stop: int, group: int = -1
) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(key, dtype, part.vector.name, start, stop, group)

"""From what servers hold to what people name, and back: parts of flat vectors <-> parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trireme.errors import CheckpointError
from trireme.ps.dense import dtype_of
from trireme.ps.layout import Layout, Vector
from trireme.ps.messages import Snapshot, Span, TensorSpec, WorkerProgress
from trireme.ps.values import Tensors

__all__ = ["ModelState", "assemble", "disassemble"]


@dataclass(frozen=True)
class ModelState:
    """All that servers hold, by parameter name; the same under any number of servers.

    Attributes:
        step: the global step.
        values: each parameter's value, in its shape.
        average: each parameter's moving average; empty where none is kept.
        optimizer: `PARAMETER/STATE` -> the optimizer's state, in the parameter's shape, or 0-dim.
        workers: the exactly-once table, of server 0.
        consumed: the examples that are in the values.
    """

    step: int
    values: dict[str, torch.Tensor]
    average: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    workers: tuple[WorkerProgress, ...] = ()
    consumed: tuple[Span, ...] = ()


def assemble(layout: Layout, parts: Sequence[tuple[Snapshot, Tensors]]) -> ModelState:
    """Joins the snapshots of all servers, in the servers' order.

    Args:
        layout: what lies where.
        parts: one snapshot a server, all of one cut.
    """
    first = parts[0][0]
    tensors = [entry for _, part in parts for entry in part]
    vectors = {vector.dtype: vector for vector in layout.vectors}
    flat: dict[tuple[str, str], torch.Tensor] = {}
    scalars: dict[tuple[str, str, int], torch.Tensor] = {}
    for spec, tensor in tensors:
        if spec.group >= 0:
            scalars[spec.key, spec.vector, spec.group] = tensor.detach().clone()
            continue
        whole = flat.get((spec.key, spec.vector))
        if whole is None:
            length = vectors[spec.vector].length
            whole = torch.zeros(length, dtype=tensor.dtype)
            flat[spec.key, spec.vector] = whole
        whole[spec.start : spec.stop] = tensor
    named: dict[str, dict[str, torch.Tensor]] = {}
    for (key, name), whole in flat.items():
        for placed in vectors[name].placed:
            value = whole[placed.start : placed.stop].reshape(placed.parameter.shape).clone()
            named.setdefault(key, {})[placed.parameter.name] = value
    for (key, name, group), scalar in scalars.items():
        for placed in vectors[name].placed:
            if placed.parameter.group == group:
                named.setdefault(key, {})[placed.parameter.name] = scalar
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
    )


def disassemble(layout: Layout, state: ModelState, server: int) -> Tensors:
    """Returns what one server loads of a state.

    Raises:
        CheckpointError: a parameter is missing in the state, or has another shape.
    """
    shapes = {p.name: p.shape for p in layout.spec.parameters}
    tensors: list[tuple[TensorSpec, torch.Tensor]] = []
    for part in layout.parts(server):
        ranges = {"values": state.values, "average": state.average}
        for key, named in _by_state(state.optimizer).items():
            if _is_scalar(key, named, shapes):
                tensors += _scalars(key, part.vector, named)
            else:
                ranges[key] = named
        for key, named in ranges.items():
            whole = _flatten(key, part.vector, named) if named else None
            if whole is not None:
                dtype = str(whole.dtype).removeprefix("torch.")
                spec = TensorSpec(key, dtype, part.vector.dtype, part.start, part.stop)
                tensors.append((spec, whole[part.start : part.stop]))
    return tensors


def _by_state(optimizer: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in optimizer.items():
        parameter, _, state = name.rpartition("/")
        kinds.setdefault(f"state/{state}", {})[parameter] = tensor
    return kinds


def _is_scalar(
    key: str, named: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Returns whether a kind of state is one number a parameter, such as a step counter."""
    telling = [tensor for name, tensor in named.items() if shapes.get(name)]
    if not telling:  # a model of 0-dim parameters only: the shapes cannot tell
        return key == "state/step"
    return all(tensor.dim() == 0 for tensor in telling)


def _flatten(key: str, vector: Vector, named: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Lays one kind of tensor out flat; None when it says nothing of this vector's parameters."""
    state = key.startswith("state/")
    whole: torch.Tensor | None = None
    for placed in vector.placed:
        name, shape = placed.parameter.name, placed.parameter.shape
        tensor = named.get(name)
        if tensor is None and state:
            continue
        if tensor is None:
            raise CheckpointError(
                f"the checkpoint has no {key} of parameter {name!r}: it is of another model"
            )
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{key} of {name!r} has shape {tuple(tensor.shape)} in the checkpoint and {shape} "
                "in the model: it is of another model"
            )
        if whole is None:
            dtype = tensor.dtype if state else dtype_of(vector.dtype)
            whole = torch.zeros(vector.length, dtype=dtype)
        whole[placed.start : placed.stop] = tensor.reshape(-1)
    return whole


def _scalars(key: str, vector: Vector, named: Mapping[str, torch.Tensor]) -> Tensors:
    """Returns one number for each parameter group.

    The parameters of a group share their step counter here; where a checkpoint of another
    strategy has several, the largest is taken.
    """
    found: dict[int, torch.Tensor] = {}
    for placed in vector.placed:
        tensor, group = named.get(placed.parameter.name), placed.parameter.group
        if tensor is not None and (group not in found or bool(tensor > found[group])):
            found[group] = tensor
    return [
        (
            TensorSpec(key, str(t.dtype).removeprefix("torch."), vector.dtype, 0, 0, group),
            t.reshape(1),
        )
        for group, t in found.items()
    ]

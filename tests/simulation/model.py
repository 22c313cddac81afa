"""A model of three small tensors, whose gradients are whole numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tests.simulation.expected_values import Vectors
from trireme.ps.layout import Layout
from trireme.ps.messages import GroupSpec, LayoutSpec, OptimizerSpec, ParameterSpec
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot import ModelState, disassemble
from trireme.ps.snapshot_messages import TensorSpec

SLOTS = 8
"""Into how many slots the model is cut: each has 16 numbers of one vector and 8 of the other."""

_PARAMETERS = (  # in the order of a layout
    ParameterSpec("weight", (7, 16), "float32", 0),
    ParameterSpec("bias", (3,), "float32", 1),
    ParameterSpec("scale", (8, 8), "float64", 0),
)
_SHARES = 60
"""Gradients are multiples of it, so that the mean of up to six of them is a whole number."""

COUNTED = 0
"""The vector whose values count updates, where a model counts."""


LATE = ParameterSpec("late", (8, 8), "float64", 1)
"""A parameter that workers add while they train."""


@lru_cache(1024)
def layout_over(bounds: tuple[int, ...], *, grown: bool = False, whole: bool = False) -> Layout:
    """Returns the model's layout over shards that begin at these slots.

    Args:
        grown: whether it has the parameter that is added.
        whole: whether it began with that.
    """
    layout = Layout(LayoutSpec((*_PARAMETERS, LATE) if whole else _PARAMETERS, bounds))
    return layout.grown((LATE,)) if grown else layout


class Model:
    """What the workers train: values by SGD with learning rate 1.

    Args:
        momentum: SGD's.
        seed: of its first values and its gradients.
        counts: whether each update adds one to the element of its worker in each slot.
    """

    def __init__(self, momentum: float, seed: int, *, counts: bool = False) -> None:
        self.layout = layout_over((0, SLOTS))
        group = GroupSpec({"lr": 1.0, "momentum": momentum})
        self.optimizer = OptimizerSpec("SGD", (group, group))
        self.momentum = momentum
        self.counts = counts
        self._rng = np.random.default_rng(seed)

    def first_state(self) -> ModelState:
        """Returns new first values: no two calls give the same."""
        values = {
            p.name: torch.from_numpy(
                self._rng.integers(-99, 99, p.shape).astype(p.dtype, copy=False)
            )
            for p in _PARAMETERS
        }
        if self.counts:
            for placed in self.layout.vectors[COUNTED].placed:
                values[placed.parameter.name].zero_()
        return ModelState(0, values)

    def state_of(self, step: int, vectors: Vectors) -> ModelState:
        """Returns the state that whole flat vectors are, without the optimizer's."""
        return ModelState(
            step,
            {
                placed.parameter.name: torch.from_numpy(
                    values[placed.start : placed.stop].reshape(placed.parameter.shape).copy()
                )
                for vector, values in zip(self.layout.vectors, vectors, strict=True)
                for placed in vector.placed
            },
        )

    def hyper(self, rate: float) -> tuple[GroupSpec, ...]:
        """Returns the optimizer's hyper-parameters with a learning rate."""
        group = GroupSpec({"lr": rate, "momentum": self.momentum})
        return group, group

    def gradient(self, worker: int, layout: Layout) -> Vectors:
        """Returns a new gradient, as whole flat vectors of a layout."""
        gradient = tuple(
            (self._rng.integers(-40, 40, vector.length) * _SHARES).astype(vector.dtype)
            for vector in layout.vectors
        )
        if self.counts:
            counted = gradient[COUNTED].reshape(SLOTS, -1)
            counted[:] = 0
            counted[:, worker] = -1
        return gradient


def part_of(layout: Layout, vectors: Vectors, shard: int) -> Vectors:
    """Returns a shard's part of whole vectors."""
    parts = layout.parts(shard)
    return tuple(v[p.start : p.stop] for v, p in zip(vectors, parts, strict=True))


def loading(
    layout: Layout, state: ModelState, *, complete: bool = True
) -> list[tuple[tuple[TensorSpec, ...], list[memoryview]]]:
    """Returns by shard what its load of a state says, and what comes with it."""
    out = []
    for shard in range(layout.spec.shards):
        tensors = disassemble(layout, state, shard, complete=complete)
        part = [*tensors, *tables_of(layout, state, shard)]
        payload = [memoryview(tensor.contiguous().numpy().tobytes()) for _, tensor in part]
        out.append((tuple(spec for spec, _ in part), [each for each in payload if each.nbytes]))
    return out


def tables_of(layout: Layout, state: ModelState, shard: int) -> Tensors:
    """Returns a shard's part of the tables of a state."""
    if not state.extra:
        return []
    from trireme.tables.job.table_extension import tensors_for

    return tensors_for(state.extra, layout.spec.bounds, shard)


def same_state(one: ModelState, other: ModelState) -> bool:
    """Returns whether two states are the same in every bit."""

    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    return (
        one.step == other.step
        and one.consumed == other.consumed
        and same(one.values, other.values)
        and same(one.optimizer, other.optimizer)
        and same(dict(one.extra), dict(other.extra))
    )

"""A model of three small tensors, whose gradients are whole numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.simulation.expected_values import Vectors
from trireme.ps.layout import Layout
from trireme.ps.messages import GroupSpec, OptimizerSpec, ParameterSpec
from trireme.ps.snapshot import ModelState, disassemble
from trireme.ps.snapshot_messages import TensorSpec

_PARAMETERS = (
    ParameterSpec("weight", (5, 7), "float32", 0),
    ParameterSpec("bias", (3,), "float32", 1),
    ParameterSpec("scale", (4, 4), "float64", 0),
)
_SHARES = 12
"""Gradients are multiples of it, so that the mean of up to four of them is a whole number."""


class Model:
    """What the workers train: values by SGD with learning rate 1.

    Args:
        servers: over how many servers it is spread.
        momentum: SGD's.
        seed: of its first values and its gradients.
    """

    def __init__(self, servers: int, momentum: float, seed: int) -> None:
        self.layout = Layout.of(_PARAMETERS, servers=servers)
        group = GroupSpec({"lr": 1.0, "momentum": momentum})
        self.optimizer = OptimizerSpec("SGD", (group, group))
        self.momentum = momentum
        self._rng = np.random.default_rng(seed)

    def first_state(self) -> ModelState:
        """Returns new first values: no two calls give the same."""
        return ModelState(
            0,
            {
                p.name: torch.from_numpy(
                    self._rng.integers(-99, 99, p.shape).astype(p.dtype, copy=False)
                )
                for p in _PARAMETERS
            },
        )

    def hyper(self, rate: float) -> tuple[GroupSpec, ...]:
        """Returns the optimizer's hyper-parameters with a learning rate."""
        group = GroupSpec({"lr": rate, "momentum": self.momentum})
        return group, group

    def gradient(self) -> Vectors:
        """Returns a new gradient, as whole flat vectors."""
        return tuple(
            (self._rng.integers(-40, 40, vector.length) * _SHARES).astype(vector.dtype)
            for vector in self.layout.vectors
        )

    def gradient_part(self, gradient: Vectors, server: int) -> list[torch.Tensor]:
        """Returns a server's part of a gradient."""
        parts = self.layout.parts(server)
        return [torch.from_numpy(v[p.start : p.stop]) for v, p in zip(gradient, parts, strict=True)]

    def loading(
        self, state: ModelState
    ) -> list[tuple[tuple[TensorSpec, ...], list[tuple[TensorSpec, torch.Tensor]]]]:
        """Returns by server what its load of a state says, and what comes with it."""
        parts = [self.parts_of(state, server) for server in range(self.layout.spec.shards)]
        return [(tuple(spec for spec, _ in part), part) for part in parts]

    def parts_of(self, state: ModelState, server: int) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns what a server loads of a state."""
        return list(disassemble(self.layout, state, server))


def same_state(one: ModelState, other: ModelState) -> bool:
    """Returns whether two states are the same in every bit."""

    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    return (
        one.step == other.step
        and one.consumed == other.consumed
        and same(one.values, other.values)
        and same(one.optimizer, other.optimizer)
    )

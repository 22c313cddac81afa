"""Several optimizers of one program as one, such as those of a generator and its discriminator.

Each updates its own parameters, and a step is a step of one of them. The layout, checkpoints and
messages contain the parameter groups of all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from trireme.errors import ConfigurationError


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers over different parameters."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Not Optimizer.__init__: groups and state are those of the optimizers themselves.
        self.optimizers = tuple(optimizers)
        self.chosen = 0  # the position of the optimizer that `step` steps
        self.defaults: dict[str, Any] = {}
        seen: dict[int, int] = {}
        for index, optimizer in enumerate(self.optimizers):
            for parameter in _parameters(optimizer):
                first = seen.setdefault(id(parameter), index)
                if first != index:
                    raise ConfigurationError(
                        f"optimizers {first} and {index} have a parameter of shape "
                        f"{tuple(parameter.shape)} in common: give each parameter to one of them"
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, the same objects."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the chosen optimizer."""
        return self.optimizers[self.chosen].step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state and groups of all optimizers, with parameters numbered in order."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for before, optimizer in self._placed():
            own = optimizer.state_dict()
            state |= {before + index: entries for index, entries in own["state"].items()}
            groups += [
                {**group, "params": [before + index for index in group["params"]]}
                for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives each optimizer its part of what `state_dict` returned."""
        groups = iter(state_dict["param_groups"])
        for before, optimizer in self._placed():
            own = [next(groups) for _ in optimizer.param_groups]
            positions = [index for group in own for index in group["params"]]
            state = {
                index - before: state_dict["state"][index]
                for index in positions
                if index in state_dict["state"]
            }
            moved = [
                {**group, "params": [index - before for index in group["params"]]} for group in own
            ]
            optimizer.load_state_dict({"state": state, "param_groups": moved})

    def _placed(self) -> list[tuple[int, torch.optim.Optimizer]]:
        """Returns each optimizer with how many parameters are before its first."""
        counts = [len(_parameters(optimizer)) for optimizer in self.optimizers]
        return list(zip(accumulate(counts, initial=0), self.optimizers, strict=False))


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers that one consists of: itself, unless it is several."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

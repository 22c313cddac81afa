"""Parameters that are frozen when a job begins, and must stay frozen."""

from __future__ import annotations

import torch
from torch import nn

from trireme.errors import ConfigurationError

__all__ = ["FrozenParameters"]


class FrozenParameters:
    """The parameters of an optimizer that require no gradient when the job begins.

    Servers hold none of their values, and receive no gradients of them.

    Args:
        model: the model, which names the parameters.
        optimizer: the optimizer over the parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if not parameter.requires_grad
        ]

    def check(self) -> None:
        """Checks that all of them are still frozen.

        Raises:
            ConfigurationError: a parameter requires a gradient now; names it.
        """
        for parameter in self._parameters:
            if parameter.requires_grad:
                named = self._model.named_parameters()
                name = next((name for name, each in named if each is parameter), "of the optimizer")
                raise ConfigurationError(
                    f"parameter {name!r} requires a gradient now, and did not when training began: "
                    "it has no place in the job and would not be trained. To unfreeze it later, "
                    "let it require a gradient when training begins, and call "
                    "requires_grad_(False) on it after that: it is left alone as long as it has "
                    "no gradient"
                )

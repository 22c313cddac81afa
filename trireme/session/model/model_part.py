"""The interface of the part of a model that one of several processes holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn


class ModelPart(ABC):
    """What a process holds of a model; a replica uses it as a `FlatModel`.

    Attributes:
        modules: the modules of this process.
        parameters: the parameters of this process by their names in the model.
        trained: those of them that are trained.
        device: the device of the parameters.
        lean: whether no process holds the whole model.
        say, warn: show the user a line, or a warning; a session sets them.
    """

    modules: list[nn.Module]
    parameters: dict[str, nn.Parameter]
    trained: list[nn.Parameter]
    device: torch.device
    lean: bool = False
    say: Callable[[str], None]
    warn: Callable[[str], None]

    @abstractmethod
    def zero_gradients(self) -> None:
        """Drops the gradients, and follows what the program has frozen and unfrozen since."""

    @abstractmethod
    def collect_gradients(self) -> None:
        """As `FlatModel.collect_gradients`."""

    @abstractmethod
    def check_gradients(self) -> None:
        """Checks that backward reached a trained parameter.

        Raises:
            ConfigurationError: it reached none.
        """

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """Returns the L2 norm of the gradient of the whole model, a 0-dim float64 tensor."""

    @abstractmethod
    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiplies all gradients in place."""

    @property
    @abstractmethod
    def buffer_names(self) -> frozenset[str]:
        """The names of the buffers that this process keeps up to date."""

"""The interface of the part of a model that one of several processes holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn


class ModelPart(ABC):
    """What a process holds of a model; a replica uses it as a `FlatModel`."""

    modules: list[nn.Module]
    parameters: dict[str, nn.Parameter]  # by their names in the model
    trained: list[nn.Parameter]
    device: torch.device
    lean: bool = False  # whether no process holds the whole model
    say: Callable[[str], None]  # shows the user a line; a session sets these two
    warn: Callable[[str], None]

    @abstractmethod
    def zero_gradients(self) -> None:
        """Drops the gradients, and follows what the program has frozen and unfrozen since."""

    @abstractmethod
    def collect_gradients(self) -> None: ...

    @abstractmethod
    def check_gradients(self) -> None: ...

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """Returns the L2 norm of the gradient of the whole model, a 0-dim float64 tensor."""

    @abstractmethod
    def scale_gradients(self, factor: torch.Tensor | float) -> None: ...

    @property
    @abstractmethod
    def buffer_names(self) -> frozenset[str]:
        """The names of the buffers that this process keeps up to date."""

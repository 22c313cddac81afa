"""The interface of a model's extra values, such as the rows of its layers in sparse tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from trireme.ps.extension import Extension, of_extension
from trireme.ps.extra import ExtraRequest

Fetch = Callable[[ExtraRequest], Any]  # returns the extra values that a request wants


class TrainedExtension(Extension):
    """The extra values that a worker computes with."""

    @abstractmethod
    def open(self, fetch: Fetch, step: int) -> str:
        """Begins at a global step, with the function that returns values; returns a warning."""

    @abstractmethod
    def close(self) -> None:
        """Forgets that function: the session is left."""

    @abstractmethod
    def forget(self) -> None:
        """Drops the gradients: those of the step before, or where they are not to be used."""

    @abstractmethod
    def request(self) -> ExtraRequest:
        """Returns the updates of this step, and which values the push is to bring."""

    @abstractmethod
    def bring(self, values: Any) -> None:
        """Takes the values that a push has brought; None where it has brought none."""

    looks_ahead: bool = False
    """Whether `expect` takes the next batch."""

    def expect(self, data: Any) -> None:
        """Takes the next batch, whose values the next push is to bring; None for none."""

    def square(self) -> float:
        """Returns the squared L2 norm of the gradients of this step."""
        return 0.0

    def scale(self, factor: float) -> None:
        """Multiplies the gradients of this step."""

    @abstractmethod
    def described(self) -> dict[str, str]:
        """Returns what a checkpoint says of the values, for `check`."""

    @abstractmethod
    def check(
        self, step: int, tensors: Mapping[str, torch.Tensor], described: Mapping[str, str]
    ) -> None:
        """Checks that a job can go on with a checkpoint's values: their dtypes and shapes."""


class ExtensionLayer(nn.Module):
    """A layer that computes with extra values of the job."""

    kind: ClassVar[str]  # the name of the plug-in's entry point, whose `trained` takes such layers

    def check_job(self, model: nn.Module, settings: Any) -> None:
        """Checks that a model with such layers can be trained with the settings of a session."""


def extension_layers(model: nn.Module) -> dict[str, ExtensionLayer]:
    """Returns the layers of a model that compute with extra values, by their paths."""
    return {
        path: module for path, module in model.named_modules() if isinstance(module, ExtensionLayer)
    }


def extension_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainedExtension | None:
    """Returns the extra values of a model; None where it has none."""
    layers = extension_layers(model)
    if not layers:
        return None
    kind = next(iter(layers.values())).kind
    made: TrainedExtension = of_extension(kind, "trained")(layers, optimizer)
    return made

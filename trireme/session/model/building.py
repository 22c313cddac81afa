"""Builds what a program gives: its model, on its device, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from trireme.data.seeds import derive
from trireme.errors import ConfigurationError
from trireme.ps.optimizers import JointOptimizer
from trireme.session.settings import Settings

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]  # builds an optimizer from parameters

Optimizers: TypeAlias = (
    OptimizerFactory
    | torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, OptimizerFactory | torch.optim.Optimizer]
)
"""The optimizer of a program, or several optimizers: see `Session`."""

_SEED_MODEL = 11


def device_of(settings: Settings) -> torch.device | None:
    """Returns the device of the model; None leaves it where it is. Processes share no GPU."""
    task, chosen = settings.task, settings.options.device
    if chosen is None and (task.group.size == 1 or not torch.cuda.is_available()):
        return None
    device = torch.device("cuda" if chosen is None else chosen)
    several = task.group.size > 1 or task.workers > 1
    if str(device) == "cuda" and several and torch.cuda.is_available():
        return torch.device("cuda", task.group.local_rank % torch.cuda.device_count())
    return device


def seed_model(settings: Settings) -> None:
    """Seeds torch for the first values of a session's model."""
    torch.manual_seed(derive(settings.options.seed, _SEED_MODEL))


def build_model(given: nn.Module | Callable[[], nn.Module], settings: Settings) -> nn.Module:
    """Returns a session's model on its device, in training mode."""
    seed_model(settings)
    model = given if isinstance(given, nn.Module) else given()
    device = device_of(settings)
    return (model if device is None else model.to(device)).train()


def build_optimizer(make: Optimizers, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the user's optimizer over a model's parameters; several become a joint optimizer."""
    given: Any = make
    if isinstance(given, torch.optim.Optimizer):
        return given
    if isinstance(given, Mapping) and given:
        return JointOptimizer([_named_optimizer(name, one, model) for name, one in given.items()])
    if isinstance(given, (list, tuple)) and given:
        if all(isinstance(one, torch.optim.Optimizer) for one in given):
            return JointOptimizer(given)
    elif callable(given):
        made: torch.optim.Optimizer = given(model.parameters())
        return made
    raise ConfigurationError(
        f"the optimizer is {given!r}: give a function that builds one from the parameters, such as "
        "lambda params: torch.optim.Adam(params), or an optimizer; or several: optimizers in a "
        "list, or optimizers and functions by name, in a dict"
    )


def _named_optimizer(name: str, make: object, model: nn.Module) -> torch.optim.Optimizer:
    """Returns one of several; a function builds it from the parameters of the child of its name."""
    if isinstance(make, torch.optim.Optimizer):
        return make
    child = dict(model.named_children()).get(name)
    if child is None or not callable(make):
        children = ", ".join(repr(each) for each, _ in model.named_children())
        raise ConfigurationError(
            f"the optimizer {name!r} is {make!r}: give an optimizer, or a function that builds one "
            "from the parameters of the model's child of that name; the model has "
            f"{children or 'no children'}"
        )
    optimizer: torch.optim.Optimizer = make(child.parameters())
    return optimizer

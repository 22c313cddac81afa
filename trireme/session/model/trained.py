"""The trained parameters that a process computes with: of the whole model, or of a part of it."""

from __future__ import annotations

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.ps.flat import FlatModel
from trireme.session.model.extension import TrainedExtension
from trireme.session.model.model_part import ModelPart
from trireme.session.model.module_names import named_parameters
from trireme.session.model.shared_memory import check_shared_memory

Trained = FlatModel | ModelPart


def named_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, frozen: bool = False
) -> list[list[tuple[str, nn.Parameter]]]:
    """Returns the optimizer's parameters, group by group, with the model's names for them."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    groups: list[list[tuple[str, nn.Parameter]]] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"group {index} of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not one of the model's: build the optimizer "
                    "from the parameters of the model that the session trains"
                )
        groups.append([(names[id(p)], p) for p in group["params"] if p.requires_grad or frozen])
    check_shared_memory(model, [each for group in groups for _, each in group])
    return groups


def clip(trained: Trained, limit: float, extension: TrainedExtension | None = None) -> None:
    """Scales the gradients, also of extra values, down to an L2 norm of at most `limit`."""
    norm = trained.gradient_norm()
    if extension is not None:
        norm = (norm**2 + extension.square()).sqrt()
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    trained.scale_gradients(factor)
    if extension is not None:
        extension.scale(float(factor))

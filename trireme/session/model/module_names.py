"""The names of a model's parameters and buffers, as they are in the user's module.

`torch.compile` wraps a module in another one, whose only child is the module itself, under the name
`_orig_mod`. Checkpoints and workers use the names without it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

_WRAPPED = "_orig_mod."


def own_name(name: str) -> str:
    """Returns a name without the prefix of `torch.compile`."""
    return name.replace(_WRAPPED, "")


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """As `module.named_parameters()`, by the module's own names."""
    return ((own_name(name), parameter) for name, parameter in module.named_parameters())


def named_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """As `module.named_buffers()`, by the module's own names."""
    return ((own_name(name), buffer) for name, buffer in module.named_buffers())


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """As `module.state_dict(keep_vars=True)`, by the module's own names."""
    return {own_name(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}


def called_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that a program calls: the module, or the children of a container."""
    if type(module).forward is not nn.Module.forward:
        return [module]
    return [each for child in module.children() for each in called_modules(child)]

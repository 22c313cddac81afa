"""Hooks of parameters, which a copy or a shard of a parameter does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trireme.errors import ConfigurationError
from trireme.session.model.module_names import named_parameters
from trireme.tensors import is_dtensor


def hooked(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that have hooks, by name."""
    return {name: each for name, each in named_parameters(model) if has_hooks(each)}


def has_hooks(parameter: Any) -> bool:
    """Returns whether a parameter has hooks of `register_hook`, or post-accumulate hooks."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def refusal(name: str) -> ConfigurationError:
    """Returns the error that hooks of a parameter would not run, or not on its gradient."""
    return ConfigurationError(
        f"parameter {name!r} has a hook, which would not run with its gradient: the strategy cuts "
        "the parameter, or its batches, into pieces (fsdp, tensor, pipeline, graph, a mesh). "
        "Change gradients with options (clip_norm, l2), or train with a strategy in which each "
        "process computes with the whole model, such as allreduce, async or sync"
    )


def carry_over(
    before: Mapping[str, nn.Parameter], part: Mapping[str, nn.Parameter], *, whole: bool
) -> None:
    """Gives the parameters of a part the hooks of the model's."""
    for name, original in before.items():
        parameter: Any = part.get(name)
        if parameter is None or not whole or is_dtensor(parameter):
            raise refusal(name)
        if parameter is original:
            continue
        hooks: Any = original
        for hook in (hooks._backward_hooks or {}).values():
            parameter.register_hook(hook)
        for hook in (hooks._post_accumulate_grad_hooks or {}).values():
            parameter.register_post_accumulate_grad_hook(hook)

"""Compares a graph with the model that it stands for, to the bit or nearly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten


def outcome(call: Callable[..., Any], model: nn.Module, inputs: Sequence[Any]) -> dict[str, Any]:
    """Outputs, gradients and buffers of a training step from a fixed seed; gradients are reset."""
    torch.manual_seed(1)
    leaves, structure = tree_flatten(call(*(copy.deepcopy(each) for each in inputs)))
    traced = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
    if traced:
        weights = torch.Generator().manual_seed(2)
        losses = [(each * torch.randn(each.shape, generator=weights)).sum() for each in traced]
        torch.stack(losses).sum().backward()
    found: dict[str, Any] = {"structure": str(structure)}
    found |= {f"output {i}": _kept(each) for i, each in enumerate(leaves)}
    found |= {f"gradient {name}": _kept(each.grad) for name, each in model.named_parameters()}
    found |= {f"buffer {name}": _kept(each) for name, each in model.named_buffers()}
    model.zero_grad()
    return found


def assert_same(
    call: Callable[..., Any],
    model: nn.Module,
    *batches: Sequence[Any],
    tolerance: float = 0.0,
    gradients: float | None = None,
) -> None:
    """Fails if a graph of `model` and a copy of it differ in any of several steps.

    Gradients may have a tolerance of their own.
    """
    eager = copy.deepcopy(model)
    for batch in batches:
        expected, actual = outcome(eager, eager, batch), outcome(call, model, batch)
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                own = gradients is not None and name.startswith("gradient")
                allowed = gradients if own else tolerance
                torch.testing.assert_close(
                    actual[name], value, rtol=allowed, atol=allowed, msg=lambda m, n=name: n + m
                )
            else:
                assert actual[name] == value, name


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value

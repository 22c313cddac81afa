"""Runs a model once, forward and backward, and leaves everything as it was.

The capture of a model is compared with the model itself in this way. torch.export drops some
things without a word: the backward pass of custom autograd functions, hooks of tensors, attributes
that `forward` assigns, and Python's random numbers. A rehearsal finds them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_flatten, tree_map_only

from trireme.errors import ConfigurationError


@dataclass(frozen=True, slots=True, eq=False)
class Rehearsal:
    """What one pass computed."""

    # The nesting of the output, its leaves, the buffers afterwards, and the gradients of the
    # parameters and of the inputs that require one, by their names in a sentence.
    values: dict[str, Any]
    functions: tuple[str, ...]  # the names of the custom autograd functions that the pass called


def rehearse(
    call: Callable[..., Any], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Rehearsal:
    """Calls a model, or what stands for it, and returns what came out; restores all state.

    Random numbers start from the same seed each time. The gradients are those of a fixed random
    weighting of the outputs. Parameters, their `grad`, buffers, attributes of modules and random
    states are afterwards as before, and the inputs are not changed.
    """
    versions = {name: each._version for name, each in model.named_parameters()}
    given = (tuple(args), dict(kwargs))
    args, kwargs = tree_map_only(
        torch.Tensor, lambda each: each.detach().clone().requires_grad_(each.requires_grad), given
    )
    leaves = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    with restored(model), torch.enable_grad():
        before = _Attributes(model), random.getstate(), str(np.random.get_state())
        torch.manual_seed(0)
        output = call(*args, **kwargs)
        _refuse_side_effects(model, versions, *before)
        flat, spec = tree_flatten(output)
        wanted: dict[str, torch.Tensor] = dict(model.named_parameters())
        wanted = {name: each for name, each in wanted.items() if each.requires_grad}
        wanted |= {f"input {i}": each for i, each in enumerate(leaves) if each.requires_grad}
        values: dict[str, Any] = {"the nesting of the output": str(spec)}
        for number, each in enumerate(flat):
            tensor = isinstance(each, torch.Tensor)
            values[f"output {number}"] = each.detach().clone() if tensor else each
        for name, gradient in _gradients(flat, wanted).items():
            values[f"the gradient of {name}"] = gradient
        for name, buffer in model.named_buffers():
            values[f"buffer {name}"] = buffer.detach().clone()
        return Rehearsal(values, _custom_functions(flat))


def difference(expected: Rehearsal, actual: Rehearsal) -> str:
    """Returns what differs between two rehearsals, in a sentence; "" if nothing does.

    Tensors may differ by the tolerances of `torch.testing.assert_close` for their dtype.
    """
    for name, one in expected.values.items():
        other = actual.values.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            try:
                torch.testing.assert_close(other, one, equal_nan=True)
            except AssertionError as error:
                return f"{name} differs: {' '.join(str(error).split())}"
        elif type(one) is not type(other) or one != other:
            return f"{name} is {_brief(other)}, not {_brief(one)}"
    return ""


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restores buffers, attributes of modules, and random states when the context ends."""
    attributes = _Attributes(model)
    state, generator = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            attributes.restore()
            random.setstate(state)
            np.random.set_state(generator)


class _Attributes:
    """The attributes of modules, one level deep, with the contents of their tensors.

    Parameters are not copied: of a large model the copy might not fit.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        own = [vars(each) for each in self._modules.values()]
        values = [value for attributes in own for value in attributes.values()]
        containers: list[Any] = [
            *own,
            *(each for each in values if isinstance(each, dict | list | set)),
        ]
        self._kept = {id(each): (each, each.copy()) for each in containers}
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        self._tensors = [
            (each, each.detach().clone())
            for each in [*model.buffers(), *tensors]
            if not isinstance(each, nn.Parameter)
        ]

    def changed(self) -> list[str]:
        """Returns the names of attributes that were assigned, or whose elements were."""
        names = []
        for path, module in self._modules.items():
            new, (_, kept) = vars(module), self._kept[id(vars(module))]
            for name in dict.fromkeys([*kept, *new]):
                if name == "_buffers":  # torch.export captures their changes
                    continue
                same = name in kept and name in new and _is_same(kept[name], new[name])
                if same and id(new[name]) in self._kept:
                    container, elements = self._kept[id(new[name])]
                    same = _has_same_elements(elements, container)
                if not same:
                    names.append(f"{path}.{name}".lstrip("."))
        return names

    def restore(self) -> None:
        for container, kept in self._kept.values():
            if not _has_same_elements(kept, container):
                container.clear()
                add = container.extend if isinstance(container, list) else container.update
                add(kept)
        for tensor, copy in self._tensors:
            tensor.data.copy_(copy)


def _refuse_side_effects(
    model: nn.Module, versions: dict[str, int], attributes: _Attributes, state: Any, generator: str
) -> None:
    name = f"--strategy graph cannot capture {type(model).__name__}"
    if assigned := attributes.changed():
        raise ConfigurationError(
            f"{name}: forward assigns {', '.join(assigned)}, which a graph cannot hold: make it a "
            "buffer (register_buffer), return the value from forward, or take another strategy"
        )
    changed = [key for key, each in model.named_parameters() if each._version != versions[key]]
    if changed:
        raise ConfigurationError(
            f"{name}: forward changes the parameters {', '.join(changed)} in place: change them "
            "in the training program, after the step"
        )
    if random.getstate() != state or str(np.random.get_state()) != generator:
        raise ConfigurationError(
            f"{name}: forward draws random numbers of Python or NumPy, and a graph would repeat "
            "the first ones for ever: draw them with torch"
        )


def _gradients(
    outputs: list[Any], wanted: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    traced = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if not traced or not wanted:
        return dict.fromkeys(wanted)
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each) + 1
        for each in traced
    ]
    found = torch.autograd.grad(traced, list(wanted.values()), weights, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _custom_functions(outputs: list[Any]) -> tuple[str, ...]:
    queue: list[Any] = [
        each.grad_fn for each in outputs if isinstance(each, torch.Tensor) and each.grad_fn
    ]
    seen = set(queue)
    names = set()
    while queue:
        function = queue.pop()
        if isinstance(function, BackwardCFunction) and not _is_torchs_operator(function):
            names.add(type(function).__name__.removesuffix("Backward"))
        for following, _ in function.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return tuple(sorted(names))


def _is_torchs_operator(function: Any) -> bool:
    """Returns whether torch made a function for an operator: custom, or torch.cond."""
    forward = getattr(type(function), "_forward_cls", None)
    inside = getattr(forward, "__module__", "").startswith("torch._higher_order_ops.")
    return inside or type(function).__name__.startswith("Generated")


def _is_same(one: Any, other: Any) -> bool:
    simple = int | float | str | bytes | tuple  # type: ignore[type-arg]
    if isinstance(one, simple) and isinstance(other, simple) and type(one) is type(other):
        return bool(one is other or repr(one) == repr(other))
    return one is other


def _has_same_elements(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and _is_same(each, other[key]) for key, each in one.items())
    if isinstance(one, set):
        return bool(one == other)
    return all(_is_same(*pair) for pair in zip(one, other, strict=True))


def _brief(value: Any) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)

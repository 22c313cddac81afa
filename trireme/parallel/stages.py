"""Splits a model into pipeline stages: contiguous sections of its chain of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from trireme.errors import ConfigurationError

Link = tuple[str, nn.Module]  # a layer with its full name in the model


class Stage(nn.Module):
    """Consecutive layers of a model, under their names in the model.

    Where it `rehearses`, the next pass does not change the layers' state: torch's schedules infer
    shapes with it, from uninitialised memory.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__()
        for name, layer in links:
            *path, last = name.split(".")
            place: nn.Module = self
            for step in path:
                if step not in place._modules:
                    place.add_module(step, nn.Module())
                place = place.get_submodule(step)
            place.add_module(last, layer)
        self.names = tuple(name for name, _ in links)
        self.rehearses = False

    def forward(self, value: Any) -> Any:
        """Applies the layers one after the other.

        The output, and the gradient of the input, are contiguous, as sending requires.
        """
        if self.rehearses:
            self.rehearses = False
            with _without_trace(self):
                return self.forward(value)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        for name in self.names:
            value = self.get_submodule(name)(value)
        return value.contiguous() if isinstance(value, torch.Tensor) else value


@contextmanager
def _without_trace(module: nn.Module) -> Iterator[None]:
    """Restores what a forward pass changes: buffers, modules' dictionaries, the random state."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    noted = [(notes, dict(notes)) for part in module.modules() for notes in notes_of(part).values()]
    with torch.random.fork_rng():
        yield
    for buffer, tensor in buffers:
        buffer.data.copy_(tensor)  # not a change for autograd: backward may still need it
    for notes, before in noted:
        notes.clear()
        notes.update(before)


def notes_of(module: nn.Module) -> dict[str, dict[Any, Any]]:
    """Returns the dictionaries in which a module keeps state of its own, by attribute."""
    own = vars(nn.Module())
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, dict) and name not in own
    }


def is_chain(module: nn.Module) -> bool:
    """Returns whether a module is an `nn.Sequential`, which applies its children in turn."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def chain_of(model: nn.Module) -> list[Link]:
    """Returns the layers of a model that is an `nn.Sequential`; nested ones are flattened."""
    if not is_chain(model):
        raise ConfigurationError(
            f"{type(model).__name__} cannot be split into pipeline stages: its layers must form "
            "a chain, so make it an nn.Sequential (of any modules, with any names); "
            "--strategy fsdp takes any model"
        )
    links: list[Link] = []
    for name, child in model.named_children():
        if is_chain(child):
            links += [(f"{name}.{deep}", layer) for deep, layer in chain_of(child)]
        else:
            links.append((name, child))
    return links


def parameter_costs(links: Sequence[Link]) -> list[float]:
    """Returns an estimate of each layer's cost: its parameters, and a small constant."""
    counts = [float(sum(p.numel() for p in layer.parameters())) for _, layer in links]
    least = max(sum(counts), 1.0) / (100 * len(counts))
    return [count + least for count in counts]


def balance(costs: Sequence[float], stages: int) -> list[int]:
    """Returns where each stage after the first begins, with the least cost of the costliest stage.

    Dynamic programming over (first layer, stages left); each stage has at least one layer.
    """
    layers = len(costs)
    if layers < stages:
        raise ConfigurationError(
            f"{stages} pipeline stages and a model of {layers} layers: a stage needs at least one; "
            f"use at most --mesh pp={layers}"
        )
    sums = list(accumulate(costs, initial=0.0))
    # best[first] is the best split of the layers from `first` on into the present number of stages:
    # the cost of its costliest stage, and where its stages after the first begin.
    best: dict[int, tuple[float, list[int]]]
    best = {first: (sums[layers] - sums[first], []) for first in range(layers)}
    for left in range(2, stages + 1):
        best = {
            first: min(
                (
                    (max(sums[cut] - sums[first], best[cut][0]), [cut, *best[cut][1]])
                    for cut in range(first + 1, layers - left + 2)
                ),
                key=lambda split: split[0],
            )
            for first in range(layers - left + 1)
        }
    return best[0][1]


def cut_at(links: Sequence[Link], names: Sequence[str]) -> list[int]:
    """Returns where stages begin, given the names of the layers that begin them."""
    places: list[int] = []
    for name in names:
        inside = name + "."
        found = [i for i, (link, _) in enumerate(links) if (link + ".").startswith(inside)]
        if not found:
            known = ", ".join(link for link, _ in links)
            raise ConfigurationError(f"split point {name!r} is not a layer: the layers are {known}")
        places.append(found[0])
    if places != sorted(set(places)) or (places and places[0] == 0):
        raise ConfigurationError(
            f"split points {', '.join(names)}: name layers in the model's order, each once, and "
            "not the first: it begins the first stage anyway"
        )
    return places

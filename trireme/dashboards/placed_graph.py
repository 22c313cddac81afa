"""The dataflow graph of a placed model, as TensorBoard's graph of it: each node on its device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from trireme.dashboards.events import device_name
from trireme.dashboards.forward_tracer import Graph, Names, Node, Output
from trireme.graph.drawing.words import operator_name, scope_of
from trireme.tensors import tensors_in

_ANY = -1  # a size that differs between batches, as TensorFlow writes it


def placed_graph(module: fx.GraphModule, devices: Mapping[str, str]) -> Graph:
    """Returns the nodes of a captured graph, with their shapes and devices.

    Nothing is computed: shapes are those that the capture has noted. Operators are in the scopes of
    their modules, parameters and buffers have their names in the model. `devices` has that of each
    node that is placed, such as `worker:1/cpu`; each task computes others for itself.
    """
    scopes = {scope_of(node).replace(".", "/") for node in module.graph.nodes}
    # A node must not have the name of a scope, nor of a scope around one.
    names = Names(name for scope in scopes for name in _around(scope))
    given: dict[fx.Node, str] = {}
    nodes = []
    for node in module.graph.nodes:
        kind, wanted = _described(module, node)
        given[node] = names.unique(wanted)
        place = devices.get(node.name)
        nodes.append(
            Node(
                given[node],
                kind,
                device_name(place) if place else "",
                tuple(given[each] for each in node.all_input_nodes),
                () if node.op == "output" else tuple(map(_output, tensors_in(_value(node)))),
            )
        )
    return tuple(nodes)


def _described(module: fx.GraphModule, node: fx.Node) -> tuple[str, str]:
    """Returns what a node is, and the name that TensorBoard is to show for it."""
    if node.op == "placeholder":
        return "Input", "input"
    if node.op == "output":
        return "Output", "result"
    scope = scope_of(node).replace(".", "/")
    if node.op == "get_attr":
        target = str(node.target)
        parameter = isinstance(attrgetter(target)(module), nn.Parameter)
        return ("Parameter" if parameter else "Buffer"), target.replace(".", "/")
    operator = operator_name(node)
    short = operator.removeprefix("aten.").partition(".")[0]
    return operator, f"{scope}/{short}" if scope else short


def _around(scope: str) -> Iterator[str]:
    """Yields a scope and the scopes around it."""
    while scope:
        yield scope
        scope = scope.rpartition("/")[0]


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _output(tensor: torch.Tensor) -> Output:
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    shape = tuple(size if isinstance(size, int) else _ANY for size in sizes)
    return Output(shape, str(tensor.dtype), 0)

"""What the drawings of a placed graph show, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from typing import Any, Self

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from trireme.graph.capture.source import scope, source_line
from trireme.graph.execute.cut import Cut, cut
from trireme.graph.place.costs import CostGraph, Hardware, Operation
from trireme.graph.place.placement import Placement

OPERATOR, LOSS = "call_function", "loss"
"""The kinds of nodes that compute something; the others are those of `fx.Node.op`."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operator, an input or output of the model, or a parameter that is placed by itself."""

    name: str
    kind: str
    operator: str = ""  # such as `aten.linear`
    scope: str = ""  # the path of its module, with dots; "" for the model itself
    shape: str = ""  # the dtype and shape of its value, such as `float32[s0, 10]`
    source: str = ""  # the line that it comes from, as `file:line`; "" if unknown
    place: str = ""  # such as `worker:1/cpu`; "" for what each task computes for itself
    cost: Operation = field(default_factory=lambda: Operation(""))

    @property
    def computes(self) -> bool:
        """Whether it is an operator or the loss."""
        return self.kind in (OPERATOR, LOSS)

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the modules around it, outermost first."""
        return tuple(filter(None, self.scope.split(".")))


@dataclass(frozen=True, slots=True)
class Totals:
    """What some nodes cost together, for one micro-batch."""

    operators: int
    seconds: tuple[float, float]  # forward and backward
    resident_bytes: int  # parameters, gradients and optimizer state
    activation_bytes: int  # what is kept from forward to backward
    places: tuple[str, ...]  # in the order of the nodes; without what each task computes

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Self:
        """Returns the totals of some nodes."""
        costs = [node.cost for node in nodes]
        return cls(
            sum(node.computes for node in nodes),
            (sum(each.forward_seconds for each in costs), sum(it.backward_seconds for it in costs)),
            sum(each.resident_bytes for each in costs),
            sum(each.activation_bytes for each in costs),
            tuple(dict.fromkeys(node.place for node in nodes if node.place)),
        )


@dataclass(frozen=True)
class Module:
    """A module with its own nodes and the modules in it, each where its first node is."""

    scope: str  # its path, with dots; "" for the model
    items: tuple[Node | Module, ...]  # in the order of execution

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.scope.rpartition(".")[2]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in it and in the modules in it."""
        parts = (item.nodes if isinstance(item, Module) else (item,) for item in self.items)
        return tuple(node for part in parts for node in part)

    @classmethod
    def of(cls, nodes: Iterable[Node], scope: str = "") -> Self:
        """Returns a module of its nodes. A module that is called again is there once."""
        depth = len(scope.split(".")) if scope else 0
        inner: dict[str, list[Node]] = {}
        order: list[Node | str] = []
        for node in nodes:
            if len(node.path) == depth:
                order.append(node)
                continue
            path = ".".join(node.path[: depth + 1])
            if path not in inner:
                order.append(path)
            inner.setdefault(path, []).append(node)
        items = (cls.of(inner[it], it) if isinstance(it, str) else it for it in order)
        return cls(scope, tuple(items))


@dataclass(frozen=True)
class Picture:
    """A placed model as a graph, and what is predicted of its step."""

    nodes: tuple[Node, ...]  # in the order of execution; a parameter is before its first reader
    cut: Cut
    places: tuple[str, ...]  # the names of the places, by their numbers
    placement: Placement
    hardware: Hardware
    micro_batches: int
    model: str  # the name of the model's class

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        placement: Placement,
        costs: CostGraph,
        hardware: Hardware,
        micro_batches: int,
        model: str,
    ) -> Self:
        """Returns what is to be shown of a placed model."""
        numbers = hardware.numbers
        devices = dict(placement.devices)
        output = module.graph.output_node().name
        parts = cut(
            module,
            {name: numbers[device] for name, device in devices.items()},
            output_place=numbers[devices[output]],
        )
        operations = {each.name: each for each in costs.operations}
        for node in module.graph.nodes:
            if node.target is getitem and node.args[0].name in devices:
                devices.setdefault(node.name, devices[node.args[0].name])
        nodes = tuple(
            _node(node, devices.get(node.name, ""), operations)
            for node in _in_order(module.graph, devices)
        )
        return cls(nodes, parts, tuple(numbers), placement, hardware, micro_batches, model)

    @property
    def module_places(self) -> dict[str, str]:
        """The place of each module, by its path: that of most of its nodes."""
        places: dict[str, str] = {}
        modules = [Module.of(self.nodes)]
        for module in modules:
            counts = Counter(node.place for node in module.nodes if node.place)
            if counts:
                places[module.scope] = counts.most_common(1)[0][0]
            modules += (item for item in module.items if isinstance(item, Module))
        return places

    @property
    def operators(self) -> list[Node]:
        """The operators of the model."""
        return [node for node in self.nodes if node.kind == OPERATOR]

    def transfers(self) -> Iterator[tuple[str, str, str, bool]]:
        """Yields (value, sender, receiver, whether its gradient returns) of each transfer."""
        for value in self.cut.values.values():
            for reader in value.readers:
                sender, receiver = self.places[value.place], self.places[reader]
                yield value.name, sender, receiver, value.differentiable


def _in_order(graph: fx.Graph, placed: Mapping[str, str]) -> Iterator[fx.Node]:
    waiting = {node: None for node in graph.find_nodes(op="get_attr") if node.name in placed}
    for node in graph.nodes:
        if node.op != "get_attr":
            for each in node.all_input_nodes:
                if each in waiting:
                    del waiting[each]
                    yield each
            yield node
    yield from waiting


def _node(node: fx.Node, place: str, operations: Mapping[str, Operation]) -> Node:
    operator = node.op == OPERATOR
    value: Any = node.meta.get("val")
    owner = str(node.target).rpartition(".")[0] if node.op == "get_attr" else ""
    return Node(
        node.name,
        LOSS if node.op == "output" and node.name in operations else node.op,
        operator_name(node) if operator else "",
        scope(node) if operator else owner,
        "" if node.op == "output" else shape_text(value),
        source_line(node) if operator else "",
        place,
        operations.get(node.name, Operation(node.name)),
    )


def operator_name(node: fx.Node) -> str:
    """Returns the name of a node's operator, as `aten.linear` or `getitem`."""
    target = node.target
    if isinstance(target, OpOverload | HigherOrderOperator):
        name = target.name().replace("::", ".")  # type: ignore[no-untyped-call]
        return str(name).removesuffix(".default")
    return str(getattr(target, "__name__", target))


def shape_text(value: Any) -> str:
    """Returns the dtype and shape of a value of a node's metadata, as `float32[s0, 10]`."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(shape_text(each) for each in value)})"
    return "?" if value is None else str(value)

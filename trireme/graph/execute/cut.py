"""Cuts a captured graph into the segments that places compute, joined by transfers.

A *place* is where operations are computed: a device of a task. Here it is a number only. A
*segment* is what one place computes without waiting for another one. Its depth is the largest
number of transfers on a path that leads to it. A place has up to two segments of a depth: the
*early* one has the values that another place reads, and what they need; the *late* one all else. It
is computed after the values of the early one have been sent, and backward before their gradients
are waited for. Parameters and buffers that another place reads are transferred before the first
segment. Source: Abadi et al., TensorFlow (OSDI 2016), section 3.3, which joins the parts with send
and receive nodes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from trireme.errors import ConfigurationError
from trireme.graph.capture.effects import Memory
from trireme.graph.capture.rebuild import copied, rebuild
from trireme.graph.execute.node_groups import (
    COPY,
    changed,
    copy_returned_buffers,
    differentiable,
    everywhere,
    reached,
)
from trireme.graph.execute.sizes import read_sizes_of_inputs


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of the graph that one place computes without waiting."""

    place: int  # the number of the place
    depth: int  # how many transfers are before it, at most
    part: int  # 0 for the early segment of its place and depth, 1 for the late and the last one
    # takes the values that the segment receives, then the model's inputs that it reads; returns a
    # list of the outputs
    module: fx.GraphModule = field(repr=False)
    receives: tuple[str, ...]  # the values that it takes from other segments and places
    inputs: tuple[int, ...]  # the positions of the model's inputs that it reads
    # the names of the values that other segments take from it; none for the last segment, which
    # returns the model's outputs
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """A value that leaves the segment that computes it, or the place where it lives."""

    name: str  # the name of its node
    place: int  # the place that computes it, or where the parameter or buffer lives
    readers: tuple[int, ...]  # the other places that read it
    shape: tuple[Any, ...]  # its shape, in which the batch size is a symbol if it is dynamic
    dtype: torch.dtype  # its dtype
    differentiable: bool  # whether readers send a gradient back
    attribute: str = ""  # the name of the parameter or buffer; "" for what is computed


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph as several places compute it."""

    # the segments, by depth, then by place, then by part; the last one computes the model's outputs
    # from what it receives
    segments: tuple[Segment, ...]
    values: Mapping[str, Value]  # the values between segments by name, in the order of the graph
    inputs: tuple[Any, ...]  # the fake tensors of the model's inputs, where they are tensors
    nesting: TreeSpec  # the structure of the outputs, whose leaves the last segment computes
    root: fx.GraphModule = field(repr=False)  # the module that holds the parameters and buffers

    @property
    def transfers(self) -> int:
        """The number of transfers between places of the forward pass of one micro-batch."""
        return sum(len(each.readers) for each in self.values.values() if not each.attribute)


def cut(module: fx.GraphModule, places: Mapping[str, int], *, output_place: int = 0) -> Cut:
    """Cuts a captured graph by the places of its nodes."""
    return _Cutter(module, places, output_place).cut()


class _Cutter:
    def __init__(
        self, module: fx.GraphModule, places: Mapping[str, int], output_place: int
    ) -> None:
        self._module = module
        self._graph = copied(module.graph)
        read_sizes_of_inputs(self._graph)
        self._inputs = self._graph.find_nodes(op="placeholder")
        self._output = self._graph.output_node()
        copy_returned_buffers(self._graph, Memory(self._graph, module))
        self._memory = Memory(self._graph, module)
        self._groups = changed(self._graph, self._memory)
        self._everywhere = everywhere(self._graph, self._memory, module)
        self._check_numbers()
        self._places = self._placed(places, output_place)
        self._check_changed_memory()
        self._changed = [  # operations that share changed memory
            [node for node in nodes if node in self._places and node.op != "get_attr"]
            for nodes in self._groups
        ]
        self._depths = self._found_depths()
        self._early = self._found_early()

    def _value_of(self, node: fx.Node) -> Any:
        return attrgetter(str(node.target))(self._module)

    def _check_numbers(self) -> None:
        for node in self._everywhere:
            if bad := [each for each in node.all_input_nodes if each not in self._everywhere]:
                raise ConfigurationError(
                    f"{node.name} is a number that is computed from the tensor {bad[0].name}: a "
                    "graph that is cut transfers tensors only. Compute with tensors (no .item() "
                    "in forward)"
                )

    def _placed(self, places: Mapping[str, int], output_place: int) -> dict[fx.Node, int]:
        placed: dict[fx.Node, int] = {}
        for node in self._graph.nodes:
            if node in self._everywhere or node.op == "get_attr":
                continue
            first = next((each for each in node.all_input_nodes if each in placed), None)
            if node.op == "output":
                placed[node] = output_place
            elif node.target is getitem and first is not None:
                placed[node] = placed[first]
            elif node.meta.get(COPY):
                group = next(nodes for nodes in self._groups if node in nodes)
                placed[node] = next(placed[each] for each in group if each in placed)
            elif node.name in places:
                placed[node] = places[node.name]
            else:
                placed[node] = output_place if first is None else placed[first]
        order = {node: number for number, node in enumerate(self._graph.nodes)}
        for node in self._graph.find_nodes(op="get_attr"):
            if node not in self._everywhere:
                readers = sorted(node.users, key=order.__getitem__)
                default = placed[readers[0]] if readers else output_place
                placed[node] = places.get(node.name, default)
        return placed

    def _check_changed_memory(self) -> None:
        for group in self._groups:
            nodes = [node for node in group if node in self._places]
            if len({self._places[node] for node in nodes}) > 1:
                names = ", ".join(f"{node.name} (place {self._places[node]})" for node in nodes)
                raise ConfigurationError(
                    f"the graph changes memory in place that several places use: {names}. Put "
                    "these operations on one place, or write the model without the in-place "
                    "operation"
                )

    def _found_depths(self) -> dict[fx.Node, int]:
        """Returns the depth of each operation; those that share changed memory have the same."""
        least: dict[fx.Node, int] = {}
        order = [
            node for node in self._graph.nodes if node in self._places and node.op != "get_attr"
        ]
        while True:
            depths: dict[fx.Node, int] = {}
            for node in order:
                before = [each for each in node.all_input_nodes if each in depths]
                found = [depths[each] + (not self._is_local(each, node)) for each in before]
                depths[node] = max([*found, least.get(node, 0)])
            uneven = [nodes for nodes in self._changed if len({depths[node] for node in nodes}) > 1]
            if not uneven:
                return depths
            for nodes in uneven:
                least |= dict.fromkeys(nodes, max(depths[node] for node in nodes))
            if max(depths.values()) > len(order):
                names = ", ".join(node.name for node in uneven[0])
                raise ConfigurationError(
                    "the graph changes memory in place, uses it at one place both before and after "
                    f"a transfer to another one, and the transfer depends on it: {names}. Put "
                    "what is between them on the same place"
                )

    def _found_early(self) -> set[fx.Node]:
        """Returns the operations of the early segments: what is sent, and what that needs.

        All of the nodes that share changed memory are among them if one is; likewise all that read
        a value that is no tensor, such as the several results of one operator: only tensors go from
        one segment to another.
        """
        beside: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for nodes in self._changed:
            for node in nodes:
                beside[node] += nodes
        sent = [
            each
            for node in self._depths
            for each in node.all_input_nodes
            if each in self._depths and not self._is_local(each, node)
        ]

        def needed(node: fx.Node) -> list[fx.Node]:
            tensor = isinstance(node.meta.get("val"), torch.Tensor)
            near = (*node.all_input_nodes, *(() if tensor else node.users))
            known = [each for each in near if each in self._depths and each is not self._output]
            same = [e for e in known if self._depths[e] == self._depths[node]]
            return [each for each in same if self._is_local(each, node)] + beside[node]

        return reached(sent, needed)

    def _segment_of(self, node: fx.Node) -> tuple[int, int, int]:
        return self._depths[node], self._places[node], int(node not in self._early)

    def _is_local(self, value: fx.Node, reader: fx.Node) -> bool:
        return self._places[value] == self._places[reader]

    def cut(self) -> Cut:
        """Returns the cut graph."""
        readers: dict[fx.Node, set[int]] = {}  # of each value that leaves its segment
        for node in self._depths:
            for each in node.all_input_nodes:
                if each in self._places and self._leaves(each, node):
                    found = readers.setdefault(each, set())
                    if not self._is_local(each, node):
                        found.add(self._places[node])
        trained = differentiable(self._graph, self._memory, self._value_of)
        values = {
            node.name: self._value(node, readers[node], node in trained)
            for node in self._graph.nodes
            if node in readers
        }
        members: dict[tuple[int, int, int], list[fx.Node]] = defaultdict(list)
        for node in self._depths:
            if node is not self._output:
                members[self._segment_of(node)].append(node)
        segments = [
            self._segment(each, members[each], [node for node in members[each] if node in readers])
            for each in sorted(members)
        ]
        leaves: list[Any] = list(self._output.args[0])  # type: ignore[arg-type]
        segments.append(self._segment(self._segment_of(self._output), [], leaves))
        codegen: Any = self._graph._codegen
        return Cut(
            tuple(segments),
            values,
            tuple(node.meta.get("val") for node in self._inputs),
            codegen.pytree_info.out_spec,
            self._module,
        )

    def _value(self, node: fx.Node, readers: Iterable[int], differentiable: bool) -> Value:
        tensor = self._value_of(node) if node.op == "get_attr" else node.meta["val"]
        assert isinstance(tensor, torch.Tensor), f"{node.name} is {tensor}"
        return Value(
            node.name,
            self._places[node],
            tuple(sorted(readers)),
            tuple(tensor.shape),
            tensor.dtype,
            differentiable,
            str(node.target) if node.op == "get_attr" else "",
        )

    def _leaves(self, value: fx.Node, reader: fx.Node) -> bool:
        if value.op == "get_attr":  # each segment of its place reads it by itself
            return not self._is_local(value, reader)
        return reader is self._output or self._segment_of(value) != self._segment_of(reader)

    def _segment(
        self, which: tuple[int, int, int], nodes: list[fx.Node], leaves: Sequence[Any]
    ) -> Segment:
        """Returns the segment of some nodes, of none for the last one, which returns `leaves`."""
        depth, place, part = which
        graph, here = fx.Graph(), dict[fx.Node, fx.Node]()
        used = [each for node in nodes for each in node.all_input_nodes]
        used += [each for each in leaves if isinstance(each, fx.Node)]
        needed = reached(
            [*nodes, *used], lambda it: it.all_input_nodes if it in self._everywhere else ()
        )
        receives = [
            each
            for each in self._graph.nodes
            if each in needed - set(nodes) - self._everywhere
            and not (each.op == "get_attr" and self._places[each] == place)
        ]
        inputs = [number for number, node in enumerate(self._inputs) if node in needed]
        for each in [*receives, *(self._inputs[number] for number in inputs)]:
            here[each] = graph.placeholder(each.name)
        for node in self._graph.nodes:
            if node in needed and node not in here and node is not self._output:
                here[node] = graph.node_copy(node, here.__getitem__)
        graph.output([here[each] if isinstance(each, fx.Node) else each for each in leaves])
        names = tuple(each.name for each in receives)
        outputs = tuple(each.name for each in leaves) if nodes else ()
        module = rebuild(self._module, graph)
        return Segment(place, depth, part, module, names, tuple(inputs), outputs)


def fingerprint(cut: Cut) -> str:
    """Returns a SHA-256 digest, in hexadecimal, of all in which a cut must agree among tasks.

    These are the segments with their operations, places and order, the values between them with
    shapes and dtypes, the inputs and the structure of the outputs. The contents of parameters are
    no part of it.
    """
    segments = [
        (each.place, each.depth, each.part, each.receives, each.inputs, each.outputs)
        for each in cut.segments
    ]
    code = [each.module.code for each in cut.segments]
    # torch names sizes by the inputs that they are of.
    inputs = [
        (str(getattr(each, "shape", each)), str(getattr(each, "dtype", ""))) for each in cut.inputs
    ]
    values = [(str(each.shape), replace(each, shape=())) for each in cut.values.values()]
    parts = (segments, code, inputs, values, str(cut.nesting))
    return hashlib.sha256(repr(parts).encode()).hexdigest()

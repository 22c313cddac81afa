"""Cuts a captured graph into the segments that tasks compute, joined by transfers.

A *segment* is what one task computes without waiting for another one. Its depth is the largest
number of transfers on a path that leads to it: segments of the same depth can compute at the same
time, and each waits for segments of smaller depths only.

What every task can compute for itself is not transferred: the model's inputs, which every task has,
constants, and the sizes of tensors. Source: Abadi et al., TensorFlow (OSDI 2016), section 3.3,
which joins the parts with send and receive nodes in the same places.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from trireme.errors import ConfigurationError
from trireme.graph.effects import Memory
from trireme.graph.rebuild import constants_of, copied, rebuild


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of the graph that one task computes without waiting.

    Attributes:
        task: the number of the task.
        depth: how many transfers are before it, at most.
        module: takes the values that the segment receives, then the model's inputs that it reads;
            returns a list of the outputs.
        receives: the names of the values that it takes from other segments of any task.
        inputs: the places of the model's inputs that it reads.
        outputs: the names of the values that other segments take from it.
    """

    task: int
    depth: int
    module: fx.GraphModule = field(repr=False)
    receives: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """A value that leaves the segment that computes it.

    Attributes:
        name: the name of its node.
        task: the task that computes it.
        depth: the depth of the segment that computes it.
        readers: the other tasks that read it; it is sent once to each.
        shape: its shape, in which the batch size is a symbol if it is dynamic.
        dtype: its dtype.
        differentiable: whether readers send a gradient back.
    """

    name: str
    task: int
    depth: int
    readers: tuple[int, ...]
    shape: tuple[Any, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph as several tasks compute it.

    Attributes:
        segments: the segments, by depth and then by task; the last one computes the model's
            outputs from what it receives.
        values: the values between segments by name, in the order of the graph.
        inputs: the fake tensors of the model's inputs; other objects for inputs that are none.
        nesting: the structure of the outputs, whose leaves the last segment computes.
    """

    segments: tuple[Segment, ...]
    values: Mapping[str, Value]
    inputs: tuple[Any, ...]
    nesting: TreeSpec

    @property
    def transfers(self) -> int:
        """The number of transfers of the forward pass of one micro-batch."""
        return sum(len(value.readers) for value in self.values.values())


def cut(module: fx.GraphModule, tasks: Mapping[str, int], *, output_task: int = 0) -> Cut:
    """Cuts a captured graph by the tasks of its nodes.

    Args:
        module: the graph, as `capture` and the optimisations return it. It is not changed.
        tasks: the number of the task of each operation, and of parameters and buffers, by the name
            of the node. A parameter or buffer that is not named goes with its first reader, any
            other node with the first node that it reads, or to `output_task`.
        output_task: the task that receives the model's outputs.

    Raises:
        ConfigurationError: memory that an operation changes is read or changed by several tasks, or
            both before and after a transfer that depends on it; names the nodes.
    """
    return _Cutter(module, tasks, output_task).cut()


def together(module: fx.GraphModule) -> tuple[tuple[str, ...], ...]:
    """Returns the names of nodes that one task must compute, group by group.

    They use memory that one of them changes in place: such as a layer that keeps running
    statistics with its buffers, or an in-place activation with what it reads.
    """
    memory = Memory(module.graph, lambda node: attrgetter(node.target)(module))
    groups: list[set[str]] = []
    for nodes in _changed(module.graph, memory):
        names = {node.name for node in nodes}
        for other in [each for each in groups if each & names]:
            groups.remove(other)
            names |= other
        groups.append(names)
    return tuple(tuple(sorted(names)) for names in groups)


class _Cutter:
    def __init__(self, module: fx.GraphModule, tasks: Mapping[str, int], output_task: int) -> None:
        self._module = module
        self._graph = copied(module.graph)
        _read_sizes_of_inputs(self._graph)
        self._inputs = self._graph.find_nodes(op="placeholder")
        self._output = self._graph.output_node()
        constants = constants_of(module, self._graph)
        self._memory = Memory(self._graph, self._value_of)
        self._everywhere = {
            node
            for node in self._graph.nodes
            if node.op == "placeholder"
            or (node in constants and not self._memory.changes(node))
            or (node.op == "call_function" and not _has_tensors(node))
        }
        self._tasks = self._placed(tasks, output_task)
        self._check_changed_memory()
        self._depths = self._found_depths()

    def _value_of(self, node: fx.Node) -> Any:
        return attrgetter(node.target)(self._module)

    # -- where and when each node is computed -----------------------------------------------------

    def _placed(self, tasks: Mapping[str, int], output_task: int) -> dict[fx.Node, int]:
        placed: dict[fx.Node, int] = {}
        for node in self._graph.nodes:
            if node in self._everywhere or node.op == "get_attr":
                continue
            first = next((each for each in node.all_input_nodes if each in placed), None)
            if node.op == "output":
                placed[node] = output_task
            elif node.target is getitem and first is not None:
                placed[node] = placed[first]
            elif node.name in tasks:
                placed[node] = tasks[node.name]
            else:
                placed[node] = output_task if first is None else placed[first]
        for node in self._graph.find_nodes(op="get_attr"):
            if node not in self._everywhere:
                readers = [placed[user] for user in self._graph.nodes if user in node.users]
                placed[node] = tasks.get(node.name, readers[0] if readers else output_task)
        return placed

    def _check_changed_memory(self) -> None:
        for nodes in self._changed_groups():
            tasks = {self._tasks[node] for node in nodes}
            if len(tasks) > 1:
                names = ", ".join(f"{node.name} (task {self._tasks[node]})" for node in nodes)
                raise ConfigurationError(
                    f"the graph changes memory in place that several tasks use: {names}. Place "
                    "these operations on one task, or write the model without the in-place "
                    "operation"
                )

    def _changed_groups(self) -> list[list[fx.Node]]:
        return [
            [node for node in nodes if node in self._tasks]
            for nodes in _changed(self._graph, self._memory)
        ]

    def _found_depths(self) -> dict[fx.Node, int]:
        """Returns the depth of each node; that of all nodes that share changed memory is the same.

        Raises:
            ConfigurationError: it cannot be.
        """
        groups = [
            [node for node in nodes if node.op != "get_attr"] for nodes in self._changed_groups()
        ]
        least: Counter[fx.Node] = Counter()
        order = [node for node in self._graph.nodes if node in self._tasks]
        while True:
            depths: dict[fx.Node, int] = {}
            for node in order:
                depths[node] = max(
                    (
                        depths[each] + (self._tasks[each] != self._tasks[node])
                        for each in node.all_input_nodes
                        if each in depths
                    ),
                    default=0,
                )
                depths[node] = max(depths[node], least[node])
            uneven = [nodes for nodes in groups if len({depths[node] for node in nodes}) > 1]
            if not uneven:
                return depths
            for nodes in uneven:
                deepest = max(depths[node] for node in nodes)
                least.update({node: deepest - least[node] for node in nodes})
            if max(depths.values()) > len(order):
                names = ", ".join(node.name for node in uneven[0])
                raise ConfigurationError(
                    "the graph changes memory in place, uses it on one task both before and after "
                    f"a transfer to another one, and the transfer depends on it: {names}. Place "
                    "what is between them on the same task"
                )

    # -- what goes from one segment to another ----------------------------------------------------

    def cut(self) -> Cut:
        """Returns the cut graph."""
        readers: dict[fx.Node, set[int]] = {}  # of each value that leaves its segment
        for node in self._depths:
            for each in node.all_input_nodes:
                if each in self._depths and self._leaves(each, node):
                    found = readers.setdefault(each, set())
                    if self._tasks[each] != self._tasks[node]:
                        found.add(self._tasks[node])
        trained = self._differentiable()
        values = {
            node.name: Value(
                node.name,
                self._tasks[node],
                self._depths[node],
                tuple(sorted(readers[node])),
                tuple(_fake(node, self._module).shape),
                _fake(node, self._module).dtype,
                node in trained,
            )
            for node in self._depths
            if node in readers
        }
        members: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
        for node in self._depths:
            if node is not self._output and (node.op != "get_attr" or node in readers):
                members[self._depths[node], self._tasks[node]].append(node)
        segments = [self._segment(*place, members[place], readers) for place in sorted(members)]
        codegen: Any = self._graph._codegen
        return Cut(
            (*segments, self._last_segment()),
            values,
            tuple(node.meta.get("val") for node in self._inputs),
            codegen.pytree_info.out_spec,
        )

    def _leaves(self, value: fx.Node, reader: fx.Node) -> bool:
        """Returns whether a value leaves its segment to be read."""
        if value.op == "get_attr":  # each segment of its task reads it by itself
            return self._tasks[value] != self._tasks[reader]
        return reader is self._output or (self._depths[value], self._tasks[value]) != (
            self._depths[reader],
            self._tasks[reader],
        )

    def _differentiable(self) -> set[fx.Node]:
        """Returns the nodes through which the loss may depend on a trained parameter."""
        found: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op == "get_attr":
                value = self._value_of(node)
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    found.add(node)
            elif node.op == "call_function" and node.target not in _DETACHING:
                if any(each in found for each in node.all_input_nodes) and _is_floating(node):
                    found.add(node)
        return found

    def _segment(
        self, depth: int, task: int, nodes: list[fx.Node], readers: Mapping[fx.Node, set[int]]
    ) -> Segment:
        outputs = [node for node in nodes if node in readers]
        return self._built(depth, task, nodes, outputs)

    def _last_segment(self) -> Segment:
        leaves: list[Any] = list(self._output.args[0])  # type: ignore[arg-type]
        return self._built(self._depths[self._output], self._tasks[self._output], [], leaves)

    def _built(self, depth: int, task: int, nodes: list[fx.Node], leaves: list[Any]) -> Segment:
        graph, here = fx.Graph(), dict[fx.Node, fx.Node]()
        members = set(nodes)
        needed = self._needed(nodes, leaves)
        receives = [
            each
            for each in self._graph.nodes
            if each in needed - members - self._everywhere and not self._is_own(each, task)
        ]
        inputs = [place for place, node in enumerate(self._inputs) if node in needed]
        for each in [*receives, *(self._inputs[place] for place in inputs)]:
            here[each] = graph.placeholder(each.name)
        for node in self._graph.nodes:
            if node in needed and node not in here and node is not self._output:
                here[node] = graph.node_copy(node, here.__getitem__)
        graph.output([here[each] if isinstance(each, fx.Node) else each for each in leaves])
        names = [each.name for each in leaves if isinstance(each, fx.Node)]
        return Segment(
            task,
            depth,
            rebuild(self._module, graph),
            tuple(each.name for each in receives),
            tuple(inputs),
            tuple(names),
        )

    def _is_own(self, node: fx.Node, task: int) -> bool:
        return node.op == "get_attr" and self._tasks.get(node, task) == task

    def _needed(self, nodes: Iterable[fx.Node], leaves: Iterable[Any]) -> set[fx.Node]:
        """Returns nodes, what they read, and what that is computed from where all tasks can."""
        needed = set(nodes)
        open_ = [each for node in nodes for each in node.all_input_nodes]
        open_ += [each for each in leaves if isinstance(each, fx.Node)]
        while open_:
            node = open_.pop()
            if node not in needed:
                needed.add(node)
                if node in self._everywhere:
                    open_ += node.all_input_nodes
        return needed


def _changed(graph: fx.Graph, memory: Memory) -> list[list[fx.Node]]:
    """Returns the nodes that share memory which some node changes, with their readers."""
    groups: dict[fx.Node, dict[fx.Node, None]] = defaultdict(dict)
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and memory.changes(node):
            found = groups[memory.group(node)]
            found[node] = None
            found.update(dict.fromkeys(user for user in node.users if user.op != "output"))
    return [list(found) for found in groups.values()]


_DETACHING = frozenset([torch.ops.aten.detach.default, torch.ops.aten.detach_.default])


def _read_sizes_of_inputs(graph: fx.Graph) -> None:
    """Replaces the size of a tensor that some task computes by the same size of an input."""
    aten = torch.ops.aten.sym_size.int
    inputs = graph.find_nodes(op="placeholder")
    known: dict[Any, tuple[fx.Node, int]] = {}
    for node in inputs:
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                known.setdefault(size.node.expr, (node, dim))
    for node in graph.find_nodes(op="call_function", target=aten):
        size = node.meta["val"]
        if node.args[0] in inputs or not isinstance(size, torch.SymInt):
            continue
        if size.node.expr not in known:
            raise ConfigurationError(
                f"the size {size} of {node.args[0]} is none of an input's: a graph that is cut has "
                "no other sizes that depend on the batch size"
            )
        source, dim = known[size.node.expr]
        with graph.inserting_before(node):
            same = graph.call_function(aten, (source, dim))
        same.meta.update(node.meta)
        node.replace_all_uses_with(same)
        graph.erase_node(node)


def _fake(node: fx.Node, module: fx.GraphModule) -> torch.Tensor:
    """Returns a tensor of the shape and dtype of a node's value."""
    if node.op == "get_attr":
        attribute: torch.Tensor = attrgetter(node.target)(module)
        return attribute
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node.name} is {value}"
    return value


def _has_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, torch.Tensor) for each in values) or value is None


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(
        isinstance(each, torch.Tensor) and (each.is_floating_point() or each.is_complex())
        for each in values
    )

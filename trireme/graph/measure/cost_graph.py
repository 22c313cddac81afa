"""Makes the cost graph of a captured model from what its operators have been measured to cost."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from operator import attrgetter, getitem

import torch
from torch import fx

from trireme.graph.capture.capture import Capture
from trireme.graph.capture.effects import Memory
from trireme.graph.execute.node_groups import changed, everywhere
from trireme.graph.measure.measurement import Measurement, is_operator
from trireme.graph.place.costs import Constraints, CostGraph, Operation

OUTPUT = "output"  # the name of the operation that computes the loss from the model's outputs


def cost_graph(
    captured: Capture, measurement: Measurement, *, state_factor: float, update_seconds: float = 0.0
) -> CostGraph:
    """Returns the operations of a captured model with their costs, in the order of its graph.

    They are the operators, by the names of their nodes; each parameter and buffer, right before the
    first operator that reads it, so that a section of the order holds what its operators need; and
    `OUTPUT`, which computes the loss. What every task has, as the model's inputs, is left out.
    """
    module = captured.module
    replicated = everywhere(module.graph, Memory(module.graph, module), module)
    readers = {node for node in module.graph.nodes if is_operator(node)} - replicated
    operations = dict[fx.Node, Operation]()
    for node in module.graph.nodes:
        for each in node.all_input_nodes if node in readers else ():
            if each.op == "get_attr" and each not in operations and each not in replicated:
                value = attrgetter(each.target)(module)
                if isinstance(value, torch.Tensor):
                    operations[each] = _held(each.name, value, state_factor, update_seconds)
        if node in readers or node.op == "output":
            read = tuple(each.name for each in node.all_input_nodes if each in operations)
            cost = measurement.loss if node.op == "output" else measurement.costs[node.name]
            operations[node] = replace(cost, inputs=read)
    return CostGraph(tuple(operations.values()), measurement.segment_seconds)


def grouping(captured: Capture, placed: Collection[str] = ()) -> Constraints:
    """Returns which operations of a captured model share a device.

    These are the values of an operator with several ones and the operator; what uses memory that an
    operator changes in place; and a parameter or buffer and the first operator that reads it.
    """
    module, graph = captured.module, captured.module.graph
    memory = Memory(graph, module)
    replicated = everywhere(graph, memory, module)
    operations = {
        node: None
        for node in graph.nodes
        if node.op in ("call_function", "get_attr") and node not in replicated
    }
    groups: list[tuple[str, ...]] = []
    for node in operations:
        if node.target is getitem and is_operator(node):
            groups.append((node.args[0].name, node.name))
        elif node.op == "get_attr" and node.name not in placed:
            first = next((user for user in graph.nodes if user in node.users), None)
            held = isinstance(attrgetter(node.target)(module), torch.Tensor)
            if held and first is not None and is_operator(first):
                groups.append((node.name, first.name))
    for nodes in changed(graph, memory):
        # Also inputs and constants may be of a group: they are no operations.
        groups.append(tuple(node.name for node in nodes if node in operations))
    return Constraints(together=tuple(group for group in groups if len(group) > 1))


def _held(name: str, value: torch.Tensor, state_factor: float, update: float) -> Operation:
    size, trained = value.nbytes, value.requires_grad
    return Operation(
        name,
        backward_seconds=size * update if trained else 0.0,
        # Of what is trained, the value, the gradient and the state.
        resident_bytes=round(size * (2 + state_factor)) if trained else size,
        output_bytes=size,
        differentiable=trained,
        stored=True,
    )

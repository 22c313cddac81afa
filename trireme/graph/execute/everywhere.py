"""The nodes that every place computes for itself."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import fx

from trireme.graph.capture.effects import Memory
from trireme.graph.capture.rebuild import constants_of
from trireme.graph.execute.changed_memory import has_tensors
from trireme.graph.execute.views import views_of


def everywhere(graph: fx.Graph, memory: Memory, module: fx.GraphModule) -> set[fx.Node]:
    """Returns the model's inputs, constants, the sizes of tensors, and views of all these."""
    constants = constants_of(module, graph)
    found = {
        node
        for node in graph.nodes
        if node.op == "placeholder"
        or (node in constants and not memory.changes(node))
        or (
            node.op == "get_attr"
            and not isinstance(attrgetter(str(node.target))(module), torch.Tensor)
        )
        or (node.op == "call_function" and not has_tensors(node))
    }
    return found | views_of(graph, found, memory)

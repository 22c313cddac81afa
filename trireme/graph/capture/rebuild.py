"""Makes graph modules that hold the same parameters, buffers and constants as another module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn


def copied(graph: fx.Graph) -> fx.Graph:
    """Returns a copy of a graph that no module owns; its nodes share their metadata's values."""
    with warnings.catch_warnings():  # torch's own copying of the nesting of inputs is deprecated
        warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg")
        return copy.deepcopy(graph)


def rebuild(
    root: nn.Module, graph: fx.Graph, constants: Mapping[str, torch.Tensor] | None = None
) -> fx.GraphModule:
    """Returns a module that computes a graph with the attributes of another module.

    The parameters, buffers and constants are the same objects as those of `root`. Parameters and
    buffers keep their names and kinds; constants are plain attributes, in no state dict.
    (`fx.GraphModule(root, graph)` would make persistent buffers of constants.)
    """
    added = dict(constants or {})
    values: dict[str, Any] = dict(added)
    for node in graph.find_nodes(op="get_attr"):
        if node.target not in values:
            values[node.target] = attrgetter(node.target)(root)
    module = fx.GraphModule(values, graph, class_name="Captured")
    buffers = dict(root.named_buffers(remove_duplicate=False))
    persistent = set(root.state_dict(keep_vars=True))
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            continue
        path, _, field = name.rpartition(".")
        owner = module.get_submodule(path)
        delattr(owner, field)
        if name in buffers and name not in added:
            owner.register_buffer(field, value, persistent=name in persistent)
        else:
            setattr(owner, field, value)
    return module


def constants_of(module: nn.Module, graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """Returns the nodes that name constants: tensors that are neither parameters nor buffers."""
    buffers = {id(buffer) for buffer in module.buffers()}
    found: dict[fx.Node, torch.Tensor] = {}
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(node.target)(module)
        plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        if plain and id(value) not in buffers:
            found[node] = value
    return found

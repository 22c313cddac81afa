"""Makes a graph compute on a device, whatever the device that it was captured on."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import fx

from trireme.graph.capture.rebuild import constants_of, copied, rebuild


def on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Returns a module that computes the same graph on a device.

    Tensors that operators make are made there, and constants are copied there. Parameters and
    buffers are the same objects as before: the caller moves them.
    """
    if device.type == "cpu":
        return module
    graph = copied(module.graph)
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
    constants = {
        str(node.target): attrgetter(str(node.target))(module).to(device)
        for node in constants_of(module, graph)
    }
    return rebuild(module, graph, constants)

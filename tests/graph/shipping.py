"""Sends a captured graph to another process: capturing takes ten times as long."""

from __future__ import annotations

import warnings

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from trireme.graph.capture.rebuild import copied, rebuild


def packed(module: fx.GraphModule) -> bytes:
    """Returns a graph, with the fake values of its nodes, as bytes."""
    kept = rebuild(module, copied(module.graph))
    for node in kept.graph.nodes:
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    data: bytes = GraphPickler.dumps(kept)
    return data


def unpacked(data: bytes, model: nn.Module) -> fx.GraphModule:
    """Returns the graph, with the parameters and buffers of a model equal to the captured one."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = GraphPickler.loads(data, mode)
    assert isinstance(loaded, fx.GraphModule)
    return rebuild(model, copied(loaded.graph))

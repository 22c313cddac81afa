"""Notes at each operator of a capture which line of the program called it, and on which device.

torch.export alone keeps only those lines that are in functions called `forward`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode

from trireme.graph.capture.scopes import called_on
from trireme.graph.capture.source import calling_line

_NOTES = ("device", "line")


@contextmanager
def noting() -> Iterator[None]:
    """Notes at each node that torch.export makes in the context its line and its device.

    They are in the node's metadata under `custom`, as `line` (a `SourceLine`) and `device`.
    """
    with preserve_node_meta(), _Notes():
        yield


def keep_notes(module: fx.GraphModule) -> None:
    """Removes torch's own notes, and gives regions (as under `torch.no_grad`) notes.

    A region is one node, which has the notes of the first operator in it.
    """
    for node in module.graph.nodes:
        custom = node.meta.pop("custom", {})
        if not custom and node.op == "call_function":
            custom = _first_inside(module, node)
        if notes := {name: custom[name] for name in _NOTES if name in custom}:
            node.meta["custom"] = notes


def _first_inside(module: fx.GraphModule, node: fx.Node) -> Mapping[str, Any]:
    for each in node.all_input_nodes:
        region = getattr(module, str(each.target), None) if each.op == "get_attr" else None
        if isinstance(region, fx.GraphModule):
            keep_notes(region)
            operators = (inner for inner in region.graph.nodes if inner.op == "call_function")
            notes = (inner.meta.get("custom", {}) for inner in operators)
            return next(filter(None, notes), {})
    return {}


class _Notes(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        # torch.cond compiles its branches, and cannot follow the code below.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **named)
        notes = {"device": called_on(), "line": calling_line(sys._getframe(1))}
        with annotate({name: note for name, note in notes.items() if note}):
            return func(*args, **named)

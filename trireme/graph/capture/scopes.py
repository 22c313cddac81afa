"""Scopes in a program that say on which device the parts of a model are placed.

A scope around the construction of modules holds for their operators and parameters, one around
calls in `forward` for the operators of those calls. The innermost scope wins, and a scope around a
call wins over one around the construction. `ps:0` holds for parameters only. Scopes matter under
the strategy `graph` alone; otherwise they change nothing.

The scopes of the construction are kept in the modules, under a name that is in no state dict, so
that copies and pickles of a module have them too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate, preserve_node_meta
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from trireme.errors import ConfigurationError
from trireme.graph.capture.source import calling_line, scope

_NAME = re.compile(r"(worker:\d+(/cpu|/cuda:\d+)?|ps:\d+)", re.ASCII)

_open: ContextVar[tuple[str, ...]] = ContextVar("trireme device scopes", default=())

_KEY = "_trireme_devices"
"""The attribute of a module that holds what its scopes say: the device of its operators under "",
of its parameters under "*", and of each parameter under its name."""


@contextmanager
def device(name: str) -> Iterator[None]:
    """Places what is constructed or called in the context on a device.

    Args:
        name: `worker:1`, `worker:1/cuda:0`, `worker:1/cpu`, or, for parameters only, `ps:0`.

    Raises:
        ConfigurationError: the name has another form.
    """
    token = _open.set((*_open.get(), check_device(name)))
    parameters = register_module_parameter_registration_hook(_remember_parameter)
    # torch has hooks for what modules hold, but none for modules themselves. The one that is put
    # in here does nothing outside a scope, in whatever order threads leave theirs.
    construct = nn.Module.__init__
    nn.Module.__init__ = _remembering(construct)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__init__ = construct  # type: ignore[method-assign]
        parameters.remove()
        _open.reset(token)


def check_device(name: str) -> str:
    """Returns the name of a device."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r} is no device: write worker:1, worker:1/cuda:0 or worker:1/cpu, or ps:0 for "
            "parameters"
        )
    return name


def called_on() -> str | None:
    """Returns the device of operators that are called now; None outside the scope of a worker."""
    return next((each for each in reversed(_open.get()) if not each.startswith("ps:")), None)


def requested(module: fx.GraphModule, model: nn.Module) -> dict[str, str]:
    """Returns the devices that scopes say of operators and parameters, by the names of nodes."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, str | None] = {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            called = node.meta.get("custom", {}).get("device")
            found[node.name] = called or _remembered(modules, scope(node), ("",))
        elif node.op == "get_attr" and isinstance(attrgetter(node.target)(module), nn.Parameter):
            owner, _, name = node.target.rpartition(".")
            found[node.name] = _remembered(modules, owner, (name, "*"))
    return {name: place for name, place in found.items() if place is not None}


def _remembered(modules: Mapping[str, nn.Module], path: str, keys: tuple[str, ...]) -> str | None:
    """Returns the device that the innermost module with a scope has for any of some keys."""
    while True:
        kept: dict[str, str] = vars(modules[path]).get(_KEY, {}) if path in modules else {}
        for key in keys:
            if key in kept:
                return kept[key]
        if not path:
            return None
        keys, path = keys[-1:], path.rpartition(".")[0]


def _remembering(construct: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if scopes := _open.get():
            kept = self.__dict__.setdefault(_KEY, {})
            kept["*"] = scopes[-1]
            if (operators := called_on()) is not None:
                kept[""] = operators

    return __init__


def _remember_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if scopes := _open.get():
        module.__dict__.setdefault(_KEY, {})[name] = scopes[-1]


_NOTES = ("device", "line")


@contextmanager
def noting() -> Iterator[None]:
    """Notes, in `custom` of each node that torch.export makes, its `line` and its `device`."""
    with preserve_node_meta(), _Notes():
        yield


def keep_notes(module: fx.GraphModule) -> None:
    """Removes torch's own notes; a region has those of the first operator in it."""
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

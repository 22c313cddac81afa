"""Traces one forward pass: the operations of each module, and their outputs.

It traces the real pass: nothing is computed twice, and no value changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from trireme.tensors import tensors_in

Observer = Callable[[str, nn.Module, Any], None]
"""Called after a module has computed: with its name in the model, the module, and its outputs."""


@dataclass(frozen=True)
class Output:
    """A tensor that a node makes."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Node:
    """An operation, a parameter, an input or an output."""

    name: str  # unique, with scopes separated by `/`
    kind: str  # the operation, or `Parameter`, `Input` and the like
    place: str  # the task and the device, such as `worker:0/cuda:1`
    sources: tuple[str, ...] = ()  # the names of the nodes whose outputs it uses
    outputs: tuple[Output, ...] = ()


Graph = Sequence[Node]  # the nodes of one pass, in the order of execution


class ForwardTracer:
    """Hooks on every module of a model, for one forward pass of it.

    Only the first of several passes is traced. Repeated calls of a module are separate scopes, such
    as `relu` and `relu_1`.
    """

    def __init__(
        self, model: nn.Module, observe: Observer | None = None, task: str = "worker:0"
    ) -> None:
        self._model = model
        self._observe = observe
        # (name in the model, scope) of the modules that compute, innermost last.
        self._scopes: list[tuple[str, str]] = []
        self._scopes_used: set[str] = set()
        self._tracer: Any = _DispatchTracer(self._scopes, model, task)
        self._handles: list[RemovableHandle] = []
        self._began = False

    @property
    def graph(self) -> Graph:
        """The operations so far."""
        return tuple(self._tracer.nodes)

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                # Also after an exception, so that the tracer does not stay active.
                module.register_forward_hook(partial(self._leave, name), always_call=True),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._scopes:
            if name or self._began:  # not the model, or not its first pass
                return
            self._began = True
            self._tracer.inputs((args, kwargs))
            self._tracer.__enter__()
        self._scopes.append((name, self._scope_of(name)))

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if not self._scopes:
            return
        self._scopes.pop()
        raised = outputs is None
        if not self._scopes:
            self._tracer.__exit__(None, None, None)
            if not raised:
                self._tracer.outputs(outputs)
        if not raised and self._observe is not None:
            self._tracer.recording = False
            try:
                self._observe(name, module, outputs)
            finally:
                self._tracer.recording = True

    def _scope_of(self, name: str) -> str:
        outer, outer_scope = self._scopes[-1] if self._scopes else ("", "")
        scope = name.replace(".", "/")
        if outer and name.startswith(f"{outer}."):
            scope = f"{outer_scope}/{name[len(outer) + 1 :].replace('.', '/')}"
        if scope in self._scopes_used:
            scope = self._tracer.unique(scope)
        self._scopes_used.add(scope)
        return scope


@torch.no_grad()
def graph_of(model: nn.Module, inputs: Any) -> Graph:
    """Returns the graph of a model, which computes once for it, in evaluation mode.

    `inputs` are a tensor, a tuple of arguments, or a dict of keyword arguments.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with ForwardTracer(model) as watch:
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    finally:
        for module, training in modes:
            module.training = training
    return watch.graph


class _DispatchTracer(TorchDispatchMode):
    """Records every operation below autograd, with its actual tensors."""

    def __init__(self, scopes: Sequence[tuple[str, str]], model: nn.Module, task: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[Node] = []
        self.recording = True  # else operations are computed only
        self._taken = {name.replace(".", "/") for name, _ in model.named_modules()}  # names
        self._last: dict[str, int] = {}  # the number behind the newest of each name
        self._scopes = scopes
        self._task = task
        self._makers: Any = WeakTensorKeyDictionary()  # tensor -> the name of the node that made it
        kinds = {"Parameter": model.named_parameters(), "Buffer": model.named_buffers()}
        self._known = {
            id(tensor): (kind, name.replace(".", "/"))
            for kind, named in kinds.items()
            for name, tensor in named
        }

    def unique(self, name: str) -> str:
        found = name
        while found in self._taken:
            self._last[name] = self._last.get(name, 0) + 1
            found = f"{name}_{self._last[name]}"
        self._taken.add(found)
        return found

    def inputs(self, arguments: Any) -> None:
        for tensor in tensors_in(arguments):
            self._leaf(tensor, "Input", "input")

    def outputs(self, outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            maker = self._makers.get(tensor)
            if maker is not None:
                name = self.unique("result")
                self.nodes.append(Node(name, "Output", self._where(tensor), (maker,)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        if func is torch.ops.aten.detach.default:  # autograd's book-keeping: the same values
            detached = func(*args, **kwargs)
            self._makers[detached] = self._maker(args[0])
            return detached
        # Before the call: a tensor changed in place has another maker afterwards.
        taken = list(tensors_in((args, kwargs)))
        sources = tuple(dict.fromkeys(self._maker(tensor) for tensor in taken))
        results = func(*args, **kwargs)
        made = list(tensors_in(results))
        name = self.unique(self._scoped(func.overloadpacket.__name__))
        outputs = tuple(Output(tuple(t.shape), str(t.dtype)) for t in made)
        where = self._where(made[0] if made else taken[0] if taken else None)
        self.nodes.append(Node(name, str(func), where, sources, outputs))
        for tensor in made:
            self._makers[tensor] = name
        return results

    def _maker(self, tensor: torch.Tensor) -> str:
        maker: str | None = self._makers.get(tensor)
        if maker is not None:
            return maker
        known = self._known.get(id(tensor), ("Constant", self._scoped("constant")))
        return self._leaf(tensor, *known)

    def _leaf(self, tensor: torch.Tensor, kind: str, name: str) -> str:
        name = self.unique(name)
        output = Output(tuple(tensor.shape), str(tensor.dtype))
        self.nodes.append(Node(name, kind, self._where(tensor), (), (output,)))
        self._makers[tensor] = name
        return name

    def _scoped(self, name: str) -> str:
        scope = self._scopes[-1][1] if self._scopes else ""
        return f"{scope}/{name}" if scope else name

    def _where(self, tensor: torch.Tensor | None) -> str:
        return f"{self._task}/{'cpu' if tensor is None else tensor.device}"

"""Python runs this first in every process that a test starts: half of a start is spared.

The first optimizer that a process makes imports `torch._dynamo`, torch's compiler, only to tell it
what it shall never compile: a second of a core, in some four hundred processes of a test run. Here
that import waits until something of the compiler is really wanted, as `torch.compile` does. So do
two that `import torch` makes itself, a third of a second: `torch.export`, and how operations that
are written in Python know the shapes of what they return, which the compiler and DTensor ask.
The import of torch creates no garbage, so the garbage collector is off while it runs, and skips its
objects afterwards: that saves a third of the rest.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER = "torch._dynamo"
WHOLE = "torch"
BACKEND = "torch._inductor"
"""Of the compiler. Who asks torch for deterministic algorithms has its settings imported."""
EXPORT = "torch.export"
SHAPES = "torch._meta_registrations"
ASKS = "torch.distributed.tensor"
"""Its import asks for `SHAPES`."""


_RULES = SimpleNamespace(clear_lru_cache=lambda: None)
"""Stands for the compiler's rules: a new process group clears their cache, which is empty here."""


class _Waiting(ModuleType):
    """A module whose code runs when an attribute is asked for that it lacks."""

    def __getattr__(self, name: str) -> Any:
        _finder.leave()
        for each in [sys.modules.get(SHAPES), self]:  # the first is what the others build upon
            if isinstance(each, _Waiting):
                _run(each)
        return getattr(self, name)


def _run(module: _Waiting) -> None:
    module.__class__ = ModuleType  # type: ignore[assignment]
    vars(module).pop("trace_rules", None)  # or no import would find the real ones
    spec = module.__spec__
    assert spec is not None and isinstance(spec.loader, _WaitingLoader)
    module.__path__ = spec.submodule_search_locations or []
    spec.loader.real.exec_module(module)


class _WaitingLoader:
    def __init__(self, real: Any) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Waiting
        if module.__name__ == SHAPES:
            _allow_generators()
        if module.__name__ == COMPILER:
            vars(module).update(disable=_leave_alone, graph_break=lambda: None, trace_rules=_RULES)
        if module.__name__ in (COMPILER, EXPORT):
            del module.__path__  # the import of a submodule asks for it, and wants the rest


class _KeepingLoader(_WaitingLoader):
    def exec_module(self, module: ModuleType) -> None:
        gc.disable()
        self.real.exec_module(module)
        gc.freeze()
        gc.enable()


def _allow_generators() -> None:
    """Does what `torch._prims.rng_prims` would do, without which there is no `torch.Generator`."""
    native = sys.modules["torch._C"]
    if hasattr(native, "_set_generator_metaclass"):
        native._set_generator_metaclass(import_module("torch._opaque_base").OpaqueBaseMeta)


def _leave_alone(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    return function


class _Finder:
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name == ASKS:
            self.leave()
            shapes = sys.modules.get(SHAPES)
            if isinstance(shapes, _Waiting):
                _run(shapes)
        if name not in (WHOLE, COMPILER, BACKEND, EXPORT, SHAPES):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            kind = _KeepingLoader if name == WHOLE else _WaitingLoader
            spec.loader = kind(spec.loader)  # type: ignore[assignment]
        return spec

    def leave(self) -> None:
        """From now on all of it: its modules import each other in an order."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            backend = sys.modules.get(BACKEND)
            if isinstance(backend, _Waiting):
                del backend.__path__


_finder = _Finder()
sys.meta_path.insert(0, _finder)

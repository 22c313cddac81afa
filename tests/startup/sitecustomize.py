"""Python runs this first in every process that a test starts: half of a start is spared.

The first optimizer that a process makes imports `torch._dynamo`, torch's compiler, only to tell it
what it shall never compile: a second of a core, in some four hundred processes of a test run. Here
that import waits until something of the compiler is really wanted, as `torch.compile` does. So do
the shapes that operations give, a quarter of `import torch`, until something traces a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
BACKEND = "torch._inductor"
"""Of the compiler. Who asks torch for deterministic algorithms has its settings imported."""
SHAPES = "torch._meta_registrations"
"""What tensors without values need of operations that are not in C++."""
TRACERS = ("torch._decomp", "torch.distributed.tensor", "torch.distributed.fsdp")
"""Who imports one of these may need it; tensors that only have a shape import the first."""


class _Waiting(ModuleType):
    """A module whose code runs when an attribute is asked for that it lacks."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert spec is not None and isinstance(spec.loader, _WaitingLoader)
        if self.__name__ != SHAPES:
            _first_all_that_it_needs(self)
            self.__path__ = spec.submodule_search_locations or []
        spec.loader.real.exec_module(self)
        return getattr(self, name)


class _WaitingLoader(Loader):
    def __init__(self, real: Loader) -> None:
        self.real = real

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Waiting
        if module.__name__ == COMPILER:
            vars(module).update(disable=_leave_alone, graph_break=lambda: None)
            del module.__path__  # the import of a submodule asks for it, and wants the rest


class _TracerLoader(Loader):
    """Loads what may need the shapes, and then these, which import the first of it themselves."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.real.exec_module(module)
        _load_shapes()


def _first_all_that_it_needs(module: ModuleType) -> None:
    _load_shapes()
    if _finder in sys.meta_path:  # now all of it: its modules import each other in an order
        sys.meta_path.remove(_finder)
        backend = sys.modules.get(BACKEND)
        if isinstance(backend, _Waiting) and backend is not module:
            del backend.__path__


def _load_shapes() -> None:
    module = sys.modules.get(SHAPES)
    if isinstance(module, _Waiting):
        module.__getattr__("register_meta")


def _leave_alone(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    return function


LOADERS: dict[str, Callable[[Loader], Loader]] = {
    **dict.fromkeys((COMPILER, BACKEND, SHAPES), _WaitingLoader),
    **dict.fromkeys(TRACERS, _TracerLoader),
}


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loader = LOADERS.get(name)
        spec = PathFinder.find_spec(name, path) if loader else None
        if loader and spec is not None and spec.loader is not None:
            spec.loader = loader(spec.loader)
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)

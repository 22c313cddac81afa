"""Python runs this first in every process that a test starts: half of a start is spared.

The first optimizer that a process makes imports `torch._dynamo`, torch's compiler, only to tell it
what it shall never compile: a second of a core, in some four hundred processes of a test run. Here
that import waits until something of the compiler is really wanted, as `torch.compile` does.
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


class _Waiting(ModuleType):
    """A module whose code runs when an attribute is asked for that it lacks."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert spec is not None and isinstance(spec.loader, _WaitingLoader)
        if _finder in sys.meta_path:  # now all of it: its modules import each other in an order
            sys.meta_path.remove(_finder)
            backend = sys.modules.get(BACKEND)
            if isinstance(backend, _Waiting) and backend is not self:
                del backend.__path__
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


def _leave_alone(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    return function


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in (COMPILER, BACKEND):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _WaitingLoader(spec.loader)
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)

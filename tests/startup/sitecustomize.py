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


class _Waiting(ModuleType):
    """A module whose code runs when an attribute is asked for that it lacks."""

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec = self.__spec__
        assert spec is not None and isinstance(spec.loader, _WaitingLoader)
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.real.exec_module(self)
        return getattr(self, name)


class _WaitingLoader(Loader):
    def __init__(self, real: Loader) -> None:
        self.real = real

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(disable=_leave_alone, graph_break=lambda: None)
        module.__class__ = _Waiting
        del module.__path__  # a submodule's import asks for it


def _leave_alone(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    return function


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != COMPILER:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _WaitingLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())

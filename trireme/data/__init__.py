"""Data sets, the order of their examples, loading, and their distribution over workers.

Each module is imported when it is first accessed: `trireme.data.digits.load()`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["batch", "digits", "loading"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module 'trireme.data' has no attribute {name!r}")
    return importlib.import_module(f"trireme.data.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

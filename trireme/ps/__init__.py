"""The parameter server: where the parameters live, and how workers push and pull.

`trireme.ps.connect` opens it to programs that train no network; see `trireme.tables.job.connection`.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    if name == "connect":
        return importlib.import_module("trireme.tables.job.connection").connect
    raise AttributeError(f"module 'trireme.ps' has no attribute {name!r}")

"""The parameter server: where the parameters live, and how workers push and pull.

`trireme.ps.connect` opens it to programs that train no network.
"""

from __future__ import annotations

from typing import Any

__all__ = ["connect"]


def __getattr__(name: str) -> Any:
    if name == "connect":
        from trireme.ps.extension import of_extension

        return of_extension("tables", "connect")
    raise AttributeError(f"module 'trireme.ps' has no attribute {name!r}")

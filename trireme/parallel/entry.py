"""The backend of processes that hold one model together, as its entry point declares it."""

from __future__ import annotations

from trireme.strategies import BackendType

PARALLEL = BackendType("trireme.parallel.assembly:Parallel")

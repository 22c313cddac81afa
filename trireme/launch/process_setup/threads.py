"""The number of BLAS threads of a task, so that tasks on one host do not contend for its cores."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["cores", "thread_variables"]

_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_variables(
    environ: Mapping[str, str], tasks: int, available: int | None = None
) -> tuple[int, dict[str, str]]:
    """Divides the cores among tasks, each of which gets at least one thread.

    Args:
        environ: the environment. A number that the user has set there stays.
        tasks: how many tasks share the cores.
        available: the number of cores; by default all that this process may use.

    Returns:
        The number of threads of a task, and the environment variables that set it.
    """
    own = environ.get("OMP_NUM_THREADS", "")
    threads = (
        int(own)
        if own.isdecimal() and int(own) > 0
        else max(1, (cores() if available is None else available) // max(1, tasks))
    )
    return threads, {name: environ.get(name, str(threads)) for name in _VARIABLES}

"""What a task takes of its host: threads, memory, and its turn on a core.

Tasks on one host should not contend for its cores, which limits the threads of each.

By default glibc returns large blocks to the system when they are freed, and requests them again,
page by page, a moment later. A training step frees and allocates the same megabytes each time. For
LeNet-5 with batches of 100 that took 2 to 3.5 ms of 10 (decision 0011).
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 1 << 30
_RETURNED_BYTES = 1 << 20
_MOST_DESCRIPTORS = 1 << 20  # where the hard limit is above: tables of them take memory
_ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def threads_of_task(environ: Mapping[str, str], tasks: int, cores: int | None = None) -> int:
    """Returns the number of threads of a task: its part of the cores, and at least one."""
    own = environ.get("OMP_NUM_THREADS", "")
    if own.isdecimal() and int(own) > 0:
        return int(own)
    if cores is None:
        limited = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if limited else os.cpu_count() or 1
    return max(1, cores // max(1, tasks))


def thread_variables(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Returns the variables that set a task's number of threads, but for those set by the user."""
    return {name: environ.get(name, str(threads)) for name in _THREAD_VARIABLES}


def allow_many_descriptors() -> int:
    """Raises the number of descriptors that this process may open, mostly 1,024; returns it.

    That limit is meant for programs that wait by `select`, which these do not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    with suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft


def keep_freed_memory(environ: Mapping[str, str], *, limited: bool = False) -> bool:
    """Has the allocator keep up to a gigabyte of the memory that this process frees.

    Where the memory of a task is limited large tensors get memory of their own instead, which is
    returned when they are freed.
    """
    threshold = _RETURNED_BYTES if limited else _KEPT_BYTES
    if sys.platform != "linux" or any(name in environ for name in _ALLOCATOR_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, threshold) and mallopt(_TRIM_THRESHOLD, threshold))


def take_turns() -> bool:
    """Has this process, when it wakes, wait for a free core instead of preempting another process.

    In a synchronous round the preempted process is waited for next, so that nothing is gained.
    Asynchronous workers do not wait for each other, so there a server should preempt. This is the
    policy `SCHED_BATCH` of Linux; threads started from now on inherit it. It gains 2 to 8% of a
    synchronous job's steps on two cores (decision 0012).
    """
    if not hasattr(os, "SCHED_BATCH"):
        return False
    with suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user has chosen a policy
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return os.sched_getscheduler(0) == os.SCHED_BATCH

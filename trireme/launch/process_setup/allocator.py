"""Has the C library's allocator keep the memory that a task frees.

By default glibc returns large blocks to the system when they are freed, and requests them again,
page by page, a moment later. A training step frees and allocates the same megabytes each time. For
LeNet-5 with batches of 100 that took 2 to 3.5 ms of 10 (decision 0011).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 1 << 30
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Has the allocator keep up to a gigabyte of the memory that this process frees.

    Args:
        environ: the environment. If the user has configured the allocator there, nothing changes.

    Returns:
        Whether the allocator was configured. The allocators of other systems are left alone.
    """
    if sys.platform != "linux" or any(name in environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))

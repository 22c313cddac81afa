"""How the C library's allocator treats memory that a task gives back.

By default glibc returns large blocks to the system when they are freed, and gets them again, page
by page, a moment later. A training step frees and allocates the same megabytes each time: for a
small convolutional network that took more than a quarter of each step.
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
    """Has the allocator keep up to a gigabyte of what this process frees, for its next use.

    Args:
        environ: the environment; where the user has set the allocator up there, that stays.

    Returns:
        Whether it does; other systems' allocators are left as they are.
    """
    if sys.platform != "linux" or any(name in environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))

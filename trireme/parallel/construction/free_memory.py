"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def return_free_memory() -> None:
    """Returns freed memory to the operating system, where the C library is glibc.

    glibc keeps freed blocks of up to 32 MiB in its heap, where tensors of different sizes that come
    and go leave holes. Elsewhere this does nothing.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)

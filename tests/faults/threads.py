"""One thread of a process is stopped, and the others go on: as in a call that never returns."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_ALL_CHILDREN = 0x40000000


class CannotStop(Exception):
    """This user may not stop a thread of another process; says why."""


@contextmanager
def stopped_thread(thread: int) -> Iterator[None]:
    """Stops a thread while the block runs. The process may end meanwhile.

    Args:
        thread: its id in the system; that of a main thread is the process's.

    Raises:
        CannotStop: the system does not allow it.
    """
    _ptrace(_SEIZE, thread)
    _ptrace(_INTERRUPT, thread)
    os.waitpid(thread, _ALL_CHILDREN)
    try:
        yield
    finally:
        with suppress(CannotStop):  # it has ended
            _ptrace(_DETACH, thread)


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, thread, None, None) == -1:
        raise CannotStop(f"ptrace: {os.strerror(ctypes.get_errno())}")

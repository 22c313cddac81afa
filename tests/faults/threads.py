"""One thread of a process is stopped, and the others go on: as in a call that never returns."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SEIZE, _INTERRUPT, _CONTINUE, _DETACH = 0x4206, 0x4207, 7, 17
_ALL_CHILDREN = 0x40000000
_EPOLL = ("232", "281", "22")
"""The numbers of epoll_wait and epoll_pwait on x86-64, and of epoll_pwait on arm64."""
_SECONDS = 60.0


class CannotStop(Exception):
    """This user may not stop a thread of another process; says why."""


@contextmanager
def stopped_thread(thread: int) -> Iterator[None]:
    """Stops a thread that waits for events, while the block runs. The process may end meanwhile.

    One that does anything else may hold the interpreter's lock, and would stop all others too.

    Args:
        thread: its id in the system; that of a main thread is the process's.

    Raises:
        CannotStop: the system does not allow it.
    """
    _ptrace(_SEIZE, thread)
    deadline = time.monotonic() + _SECONDS
    try:
        while not _stopped_in_epoll(thread):
            assert time.monotonic() < deadline, f"thread {thread} waits for no events"
            _ptrace(_CONTINUE, thread)
        yield
    finally:
        with suppress(CannotStop):  # it has ended
            _ptrace(_DETACH, thread)


def _stopped_in_epoll(thread: int) -> bool:
    _ptrace(_INTERRUPT, thread)
    os.waitpid(thread, _ALL_CHILDREN)
    return Path(f"/proc/{thread}/syscall").read_text().split()[0] in _EPOLL


def _ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, thread, None, None) == -1:
        raise CannotStop(f"ptrace: {os.strerror(ctypes.get_errno())}")

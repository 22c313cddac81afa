"""Files without a name, which only processes that inherit their descriptor can read."""

from __future__ import annotations

import fcntl
import os
import tempfile
from typing import IO

_FIRST_OF_OTHERS = 3  # after standard input, output and errors


def nameless_file(what: str) -> IO[bytes]:
    """Returns an empty file without a name, open for reading and writing, unbuffered.

    It is in memory where the system can do that (Linux), else a temporary file that has been
    removed already. It is gone when the last process has closed it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = not_standard(os.memfd_create(f"trireme-{what}"))
        return os.fdopen(descriptor, "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def not_standard(descriptor: int) -> int:
    """Returns a descriptor that a child can inherit beside its standard streams.

    In a program that has closed one of these, as some do that run in the background, the next file
    has its number. It is moved to another one, and the given one is closed.
    """
    if descriptor >= _FIRST_OF_OTHERS:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_OF_OTHERS)
    finally:
        os.close(descriptor)

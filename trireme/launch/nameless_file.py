"""Files without a name, which only processes that inherit their descriptor can read."""

from __future__ import annotations

import os
import tempfile
from typing import IO


def nameless_file(what: str) -> IO[bytes]:
    """Returns an empty file without a name, open for reading and writing, unbuffered.

    It is in memory where the system can do that (Linux), else a temporary file that has been
    removed already. It is gone when the last process has closed it.
    """
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(f"trireme-{what}"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)

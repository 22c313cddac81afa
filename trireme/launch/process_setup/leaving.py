"""Ends a process as the interpreter would, without taking down the libraries that it has loaded.

With PyTorch loaded an interpreter takes half a second of a core to destroy its modules, and a
forked one must copy each page of them first. The kernel frees all of it at once.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

_UNWRITTEN = 120  # Python's exit status where standard output could not be written


def leave(status: int) -> NoReturn:
    """Ends this process with a status, as `sys.exit` does, but finalises nothing that is alive."""
    _call(threading._shutdown)  # type: ignore[attr-defined]
    _call(atexit._run_exitfuncs)
    _flush()  # first: a collector may close a file before the text over it is written
    gc.collect()
    written = _flush()
    os._exit(status if written or status else _UNWRITTEN)


def _call(function: object) -> None:
    try:
        function()  # type: ignore[operator]
    except BaseException:
        traceback.print_exc()


def _flush() -> bool:
    """Writes the buffers of all open files, and returns whether standard output was written."""
    every = gc.get_objects()
    for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):  # text is over bytes
        for file in every:
            # Of an instance of a class that pretends to be another one `isinstance` runs code.
            if issubclass(type(file), kind):
                with suppress(Exception):
                    file.flush()
    written = True
    for stream in (sys.stderr, sys.stdout):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except (OSError, ValueError):
            written = stream is sys.stderr
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    return written

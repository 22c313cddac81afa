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
import sysconfig
import threading
import traceback
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_UNWRITTEN = 120
"""The exit status with which Python reports that standard output could not be written."""

_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""The names of directories in which libraries are installed."""


def leave(status: int, kept: Collection[str] = ()) -> NoReturn:
    """Ends this process with a status, as `sys.exit` does at the end of a program.

    It waits for threads that are no daemons, calls the functions that are registered at exit, in
    their order, frees what the program's own modules hold, writes what is in the buffers of open
    files, and leaves. What else is alive then, in modules of libraries, is not finalised: Python
    does not promise that either.
    """
    _call(threading._shutdown)  # type: ignore[attr-defined]
    _call(atexit._run_exitfuncs)
    _flush()  # first: a collector may close a file before the text over it is written
    _forget_program({*kept})
    gc.collect()
    written = _flush()
    os._exit(status if written or status else _UNWRITTEN)


def _call(function: object) -> None:
    try:
        function()  # type: ignore[operator]
    except BaseException:
        traceback.print_exc()


def _forget_program(kept: Collection[str]) -> None:
    """Drops the modules of the program itself, so that what only they hold is freed."""
    stdlib = sysconfig.get_path("stdlib")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name in kept or name == "__main__":
            continue
        installed = _INSTALLED.intersection(Path(file).parts) or file.startswith(stdlib)
        if installed or name.partition(".")[0] == "trireme":
            continue
        del sys.modules[name]
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            with suppress(AttributeError):
                delattr(sys.modules[parent], last)


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

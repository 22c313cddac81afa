"""Processes forked from one that has imported everything already: they start at once.

A fresh process needs two seconds to import torch; many workers on few cores would spend the run
with that. The fork server imports it once, touches nothing else, and every process is its child.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

COMPLAINTS = Path(tempfile.gettempdir()) / f"trireme-bench-{os.getuid()}.txt"
"""What forked processes write to standard error."""

_PRELOAD = ["benchmarks.preload"]
_PR_SET_PDEATHSIG = 1


class Forked:
    """One process that was forked, with a pipe to it.

    Attributes:
        pid: its process id.
        pipe: our end; a message is whatever both sides agree on.
    """

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process = process
        self.pipe = pipe
        self.pid: int = process.pid

    def receive(self, seconds: float) -> Any:
        """Waits for a message.

        Raises:
            TimeoutError: none came.
            RuntimeError: the process failed; has what it raised.
        """
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"{self._process.name} said nothing for {seconds:.0f} s")
        try:
            message = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._process.name} ended without a word") from None
        if isinstance(message, BaseException):
            raise RuntimeError(f"{type(message).__name__}: {message}")
        return message

    def kill(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


def fork(name: str, main: Callable[..., None], *arguments: Any) -> Forked:
    """Runs `main(pipe, *arguments)` in a process of its own; what it raises comes over the pipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, main, arguments), name=name, daemon=True)
    process.start()
    theirs.close()
    return Forked(process, ours)


def _main(pipe: Connection, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # Dies with the fork server, and that with whoever measures.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # What libraries have to say there, in numbers, would drown the results.
    complaints = os.open(COMPLAINTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(complaints, 2)
    try:
        main(pipe, *arguments)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        os._exit(0)
    except BaseException as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
        raise

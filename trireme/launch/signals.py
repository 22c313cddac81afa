"""Signals of a launcher as bytes on a socket: its one loop waits for them as for all else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

__all__ = ["requests_to_stop", "signals"]


@contextlib.contextmanager
def signals() -> Iterator[socket.socket]:
    """Turns signals into bytes on a socket while the block runs.

    SIGHUP stays ignored where it was (`nohup`). SIGINT does not: a shell script starts every
    background job with it ignored, and yet whoever sends it to a launcher wants the job to stop.
    """
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    previous = {number: signal.getsignal(number) for number in ours}
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    with reader, writer:
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number, handler in previous.items():
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)


def requests_to_stop(fd: int) -> int:
    """Returns how many signals that ask for the job's end are there to be read."""
    with contextlib.suppress(BlockingIOError):
        return sum(number != signal.SIGCHLD for number in os.read(fd, 4096))
    return 0

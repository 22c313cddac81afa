"""Turns a launcher's signals into bytes on a socket, for which its event loop can wait."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Gives a socket that becomes readable at every signal, and the one that makes it so.

    A byte of 0 at the second one wakes the launcher without a signal.

    SIGHUP stays ignored where it was ignored before (`nohup`). SIGINT does not: a shell script
    starts every background job with SIGINT ignored, but one that is sent to a launcher still asks
    the job to stop.
    """
    previous = {number: signal.getsignal(number) for number in (*STOP, signal.SIGCHLD)}
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    with reader, writer:
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number, handler in previous.items():
            if number != signal.SIGHUP or handler is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        try:
            yield reader, writer
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)


def requests_to_stop(fd: int) -> list[str]:
    """Reads the signals that have arrived and returns the names of those that ask to stop."""
    with contextlib.suppress(BlockingIOError):
        return [signal.Signals(number).name for number in os.read(fd, 4096) if number in STOP]
    return []

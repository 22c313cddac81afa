"""One task as a child process: its output line by line, its messages, its signals, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from trireme.launch.exit_reason import ExitReason, decode_reason, describe_status

CHUNK_BYTES = 1 << 16
LINE_BYTES = 1 << 20
FINAL_CHUNKS = 64


@dataclass(slots=True)
class Pipe:
    """A pipe from a task, read without waiting.

    `take` is called with each line, without its line end. Of text that carriage returns overwrite,
    such as a progress bar, only the last state counts.
    """

    stream: IO[bytes]  # it does not block
    take: Callable[[bytes], None]
    partial: bytes = b""  # what came after the last line end

    def read(self) -> int | None:
        """Returns how many bytes were read: 0 at the end, None if there are none now."""
        try:
            data = os.read(self.stream.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return None
        *complete, partial = (self.partial + data).split(b"\n")
        self.partial = partial if len(partial) <= LINE_BYTES else _last_state(partial)[-LINE_BYTES:]
        for line in complete:
            self.take(_last_state(line))
        return len(data)

    def close(self) -> None:
        """Reads what is left, a last line without a line end too, and closes the pipe."""
        # A process outside the group may hold the pipe and write on: read a bounded amount.
        for _ in range(FINAL_CHUNKS):
            if not self.read():
                break
        if self.partial:
            self.take(_last_state(self.partial))
        self.stream.close()


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class ForkedProcess:
    """A child of this process that another process has forked for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns its exit status, or minus the number of a signal; None while it lives."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                self._status = -signal.SIGKILL
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, sig: int) -> None:
        """Sends it a signal, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, sig)


class TaskProcess:
    """A running task, leader of a session and process group of its own.

    Attributes:
        pid: its process id.
        pipes: the pipes from it. Read them when they are ready.
    """

    def __init__(
        self,
        child: ForkedProcess | subprocess.Popen[bytes],
        output: IO[bytes],
        error: IO[bytes],
        messages: IO[bytes],
        *,
        show: Callable[[bytes, bool], None],
    ) -> None:
        self.pid = child.pid
        self._child = child
        self._reason: ExitReason | None = None
        self.pipes = [
            Pipe(output, lambda line: show(line, False)),
            Pipe(error, lambda line: show(line, True)),
            Pipe(messages, self._take_message),
        ]
        for pipe in self.pipes:
            os.set_blocking(pipe.stream.fileno(), False)

    def poll(self) -> int | None:
        """Returns its exit status, or minus the number of a signal; None while it lives."""
        return self._child.poll()

    def send_signal(self, sig: int) -> None:
        """Asks the task to end by SIGTERM, or ends it and its children at once by SIGKILL."""
        if sig != signal.SIGKILL:
            self._child.send_signal(sig)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def finish(self, status: int) -> ExitReason:
        """Takes in what an ended task has left, kills its children, and closes its pipes."""
        self.send_signal(signal.SIGKILL)  # a process group outlives its leader
        for pipe in self.pipes:
            pipe.close()
        return self._reason or describe_status(status)

    def _take_message(self, line: bytes) -> None:
        self._reason = decode_reason(line) or self._reason

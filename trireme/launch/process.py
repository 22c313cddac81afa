"""One task as a child process: its output line by line, its messages, its signals, its end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from trireme.launch.config.task_config import TaskConfig
from trireme.launch.exit_reason import ExitReason, decode_reason, describe_status
from trireme.plugins import Plugins

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


class Child(Protocol):
    """A child of this process, as `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...


class Template(Protocol):
    """What tasks of one job are forked from, sooner than new processes would have begun."""

    ready: bool  # tasks can be forked now
    gone: bool  # no more tasks can be forked

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `look` has something to do."""

    def look(self) -> None:
        """Takes in what has happened, without waiting."""

    def fork(
        self, config: TaskConfig, command: Sequence[str], output: int, error: int
    ) -> Child | None:
        """Forks a task that is as if it had been started with a command line; None if it cannot."""

    def close(self) -> None:
        """Ends it. May be repeated."""


@dataclass(frozen=True, slots=True)
class TemplateType:
    """A kind of template.

    `open`, as `package.module:function`, takes the environment of every task, the program with its
    arguments, the directory to start tasks in (None for this process's own) and the console, and
    returns the template, or None where tasks had better not be forked.
    """

    open: str


TEMPLATES = Plugins("trireme.templates", "template", TemplateType)


class TaskProcess:
    """A running task, leader of a session and process group of its own, with the pipes from it."""

    def __init__(
        self,
        child: Child,
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

"""The template of a launcher's tasks, as the launcher sees it.

The template is a process that has imported PyTorch and the parts of Trireme that every task needs,
and has done nothing else. A task that is forked from it does not import them again. Each task is a
child of the launcher, and not of the template: the template forks twice, the process in between
ends, and the kernel gives the task to the launcher, which has asked for orphans
(`PR_SET_CHILD_SUBREAPER`) during that time. So the launcher alone waits for tasks, and they live on
when the template dies. `trireme/cli/template.py` is the program of the template.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from trireme.launch.exit_reason import describe_status
from trireme.launch.forking.fork_request import (
    LIMIT_BYTES,
    Answer,
    Forked,
    ForkRequest,
    Ready,
    Refused,
)

FORK_SECONDS = 10.0
"""How long a fork may take; a loaded machine takes some hundredths of a second."""

READY_SECONDS = 60.0
"""How long the imports may take; a slow machine takes ten seconds."""

ROOM = 4096
"""The longest command line of a task that a list of processes shows in full, in bytes."""

_PR_SET_CHILD_SUBREAPER = 36


class TaskTemplate:
    """A process that tasks are forked from. Use it as a context manager.

    Use it from one thread only, which must be the launcher's main thread: the kernel ties the life
    of the template to it.

    Attributes:
        ready: whether it has imported everything.
        trouble: why no tasks can be forked from it; "" while they can, or may be soon.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        path: Path,
        directory: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ready = False
        self._clock = clock
        self._late_at = clock() + READY_SECONDS
        self.trouble = ""
        self._received = b""
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = (
                *(sys.executable, "-m", "trireme.cli.template"),
                *("--tied-to", str(os.getpid()), "--socket", str(theirs.fileno())),
                *("--path", str(path), "--room", "." * ROOM),
            )
            self._process = subprocess.Popen(
                command,
                env=dict(environ),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether a task can be forked now, or may be soon."""
        return not self.trouble

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `look` has something to do."""
        return self._socket.fileno()

    def look(self) -> None:
        """Takes in what the template has said, without waiting; gives up one that is late."""
        self._socket.settimeout(0.0)
        with suppress(BlockingIOError):
            while self.usable:
                self._take(self._receive())
        if self.usable and not self.ready and self._clock() > self._late_at:
            self._fail(f"it had not imported PyTorch after {READY_SECONDS:g} s")

    def fork(self, request: ForkRequest, descriptors: Sequence[int]) -> int | None:
        """Forks a task, and returns its process id; None if that failed, see `trouble`.

        The template must be ready.
        """
        data = msgspec.json.encode(request) + b"\n"
        deadline = time.monotonic() + FORK_SECONDS
        _adopt_orphans(True)
        try:
            self._socket.settimeout(FORK_SECONDS)
            sent = socket.send_fds(self._socket, [data], list(descriptors))
            self._socket.sendall(data[sent:])
            while self.usable:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                answer = self._receive()
                self._take(answer)
                if isinstance(answer, Forked):
                    return answer.pid
        except OSError as error:  # a timeout is one
            self._fail(f"it did not fork: {error}")
        finally:
            _adopt_orphans(False)
        return None

    def close(self) -> None:
        """Ends the process, and closes the connection to it. May be repeated."""
        self._end()
        self._socket.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _receive(self) -> Answer | None:
        """Returns the next answer; None at the end."""
        while b"\n" not in self._received:
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data or len(self._received) > LIMIT_BYTES:
                return None
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        with suppress(msgspec.MsgspecError):
            answer: Answer = msgspec.json.decode(line, type=Answer)
            return answer
        return None

    def _take(self, answer: Answer | None) -> None:
        match answer:
            case Ready():
                self.ready = True
            case Forked():
                pass
            case Refused(reason):
                self._fail(reason)
            case None:
                self._fail("")

    def _fail(self, reason: str) -> None:
        self.ready = False
        if not reason:
            with suppress(subprocess.TimeoutExpired):
                reason = f"it {describe_end(self._process.wait(1.0))}"
        self.trouble = reason or "it says nothing that can be read"
        self._end()  # the descriptor stays open: a selector may know it


def describe_end(status: int) -> str:
    """Returns how a process ended, in words that go on after "it"."""
    summary = describe_status(status).summary
    return f"was {summary}" if summary.startswith("killed") else summary


def can_fork() -> bool:
    """Returns whether this system lets a launcher have the tasks that its template forks."""
    return sys.platform == "linux" and os.path.isdir("/proc/self") and _adopt_orphans(False)


def _adopt_orphans(whether: bool) -> bool:
    """Has orphaned descendants become children of this process, or not any more."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0) == 0

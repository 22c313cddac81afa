"""The template of a launcher's tasks, as the launcher sees it.

The template is a process that has imported PyTorch and the parts of Trireme that every task needs,
and has done nothing else. A task that is forked from it does not import them again. Each task is a
child of the launcher, and not of the template: the template forks twice, the process in between
ends, and the kernel gives the task to the launcher, which has asked for orphans meanwhile
(`PR_SET_CHILD_SUBREAPER`). So they live on when the template dies, whose program is `process.py`.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.exit_reason import describe_status
from trireme.launch.output import Console

FORK_SECONDS = 10.0  # how long a fork may take; a loaded machine takes some hundredths of a second

READY_SECONDS = 60.0  # how long the imports may take; a slow machine takes ten seconds

ROOM = 4096  # the longest command line of a task that a list of processes shows in full, in bytes

OUTPUT, ERROR = "stdout", "stderr"
"""The names of the descriptors that become a task's standard output and error."""

LIMIT_BYTES = 1 << 22
"""The most bytes of a request or an answer. A command line has at most two million."""

BLAS_VARIABLE = "OPENBLAS_NUM_THREADS"

_PR_SET_CHILD_SUBREAPER = 36
_IMPORTS_TORCH = re.compile(r"^(?:import|from)\b.*\b(?:torch|trireme)\b", re.MULTILINE)
_ENVIRONMENT = re.compile(r"\b(?:environb?|putenv|unsetenv)\b")


class ForkRequest(msgspec.Struct, frozen=True):
    """Asks the template for a task, in a line of JSON."""

    arguments: tuple[str, ...]  # its command line, from its interpreter on
    environ: dict[str, str]  # the variables in which it differs from the template
    # what the descriptors with the request are: `OUTPUT`, `ERROR`, one of `TaskConfig.descriptors`
    descriptors: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True):
    """What the template answers, in a line of JSON; an empty one: it has imported everything."""

    pid: int = 0  # of a task that now runs, as a child of the launcher
    refusal: str = ""  # why it cannot fork tasks, in words that go on after "because"


def open_template(
    environ: Mapping[str, str], program: Sequence[str], directory: Path | None, console: Console
) -> TaskTemplate | None:
    """Returns a template; None where this system cannot fork tasks, or the program forbids it.

    It does where it sets variables which PyTorch reads when it is imported.
    """
    if not can_fork():
        return None
    path = (directory or Path()).resolve()
    # A program without a script, such as a module, finds its modules in the directory first.
    script = path / program[0] if program else path
    with suppress(OSError, UnicodeDecodeError):
        if sets_environment_early(script.read_text(encoding="utf-8")):
            console.say(
                f"{program[0]} may set environment variables before it imports torch: each task "
                "imports torch by itself, which takes longer"
            )
            return None
    if script.is_file():
        path = script.resolve().parent
    return TaskTemplate(environ, path, directory, partial(console.say, alarm=True))


class ForkedProcess:
    """A child of this process that another process has forked for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                self._status = -signal.SIGKILL
            else:
                self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


class TaskTemplate:
    """The process that the tasks of one job are forked from. Close it at the end.

    Use it from one thread only, which must be the launcher's main thread: the kernel ties the life
    of the template to it.
    """

    def __init__(
        self,
        environ: Mapping[str, str],  # of every task, but for what tells each what it is
        path: Path,  # where the user's program finds its modules first
        directory: Path | None,  # to start tasks in; None for this process's own
        say: Callable[[str], object],
    ) -> None:
        self.ready = False  # whether tasks can be forked now
        self.gone = False  # whether they cannot be forked any more
        self._say = say
        self._late_at = time.monotonic() + READY_SECONDS
        self._received = b""
        # A BLAS that starts threads when it is loaded waits until a task has been forked.
        self._own = {BLAS_VARIABLE: environ[BLAS_VARIABLE]} if BLAS_VARIABLE in environ else {}
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = (
                *(sys.executable, "-m", "trireme.fork.process"),
                *("--tied-to", str(os.getpid()), "--socket", str(theirs.fileno())),
                *("--path", str(path), "--room", "." * ROOM),
            )
            self._process = subprocess.Popen(
                command,
                env={**environ, BLAS_VARIABLE: "1"},
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Returns the descriptor that becomes readable when `look` has something to do."""
        return self._socket.fileno()

    def look(self) -> None:
        """Takes in what the template has said, without waiting; gives up one that is late."""
        self._socket.settimeout(0.0)
        with suppress(BlockingIOError):
            while not self.gone:
                self._receive()
        if not self.gone and not self.ready and time.monotonic() > self._late_at:
            self._fail(f"it had not imported PyTorch after {READY_SECONDS:g} s")

    def fork(
        self, config: TaskConfig, command: Sequence[str], output: int, error: int
    ) -> ForkedProcess | None:
        """Forks a task that is as if it had been started with a command line.

        Returns None if it could not be forked, which has been said.
        """
        if not self.ready:
            return None
        inherited = config.descriptors
        environ = {**self._own, TASK_VARIABLE: encode_task(config)}
        request = ForkRequest(tuple(command), environ, (OUTPUT, ERROR, *inherited))
        data = msgspec.json.encode(request) + b"\n"
        deadline = time.monotonic() + FORK_SECONDS
        _adopt_orphans(True)
        try:
            self._socket.settimeout(FORK_SECONDS)
            sent = socket.send_fds(self._socket, [data], [output, error, *inherited.values()])
            self._socket.sendall(data[sent:])
            while not self.gone:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                if pid := self._receive():
                    return ForkedProcess(pid)
        except OSError as failure:  # a timeout is one
            self._fail(f"it did not fork: {failure}")
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

    def _receive(self) -> int:
        while b"\n" not in self._received:
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data or len(self._received) > LIMIT_BYTES:
                self._fail(self._how_it_ended())
                return 0
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.MsgspecError:
            answer = Answer(refusal="it says nothing that can be read")
        if answer.refusal:
            self._fail(answer.refusal)
        self.ready = not self.gone
        return answer.pid

    def _how_it_ended(self) -> str:
        try:
            summary = describe_status(self._process.wait(1.0)).summary
        except subprocess.TimeoutExpired:
            return "it says nothing that can be read"
        return f"it was {summary}" if summary.startswith("killed") else f"it {summary}"

    def _fail(self, reason: str) -> None:
        self.ready, self.gone = False, True
        self._end()  # the descriptor stays open: a selector may know it
        self._say(
            "WARNING: each task imports PyTorch by itself from now on, which takes longer: the "
            f"process that tasks are forked from (pid {self.pid}) is of no use, because "
            f"{reason}"
        )


def can_fork() -> bool:
    """Returns whether this system lets a launcher have the tasks that its template forks."""
    return sys.platform == "linux" and os.path.isdir("/proc/self") and _adopt_orphans(False)


def _adopt_orphans(whether: bool) -> bool:
    """Has orphaned descendants become children of this process or not; returns if it works."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl is not None and prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0) == 0


def sets_environment_early(source: str) -> bool:
    """Returns whether a program may change its environment before it imports PyTorch.

    Some variables are read at that import, such as `OMP_NUM_THREADS` or `TORCH_LOGS`. Modules that
    the program imports are not looked at.
    """
    before = _IMPORTS_TORCH.split(source, maxsplit=1)[0]
    return _ENVIRONMENT.search(before) is not None

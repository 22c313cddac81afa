"""The program of the process that a launcher forks its tasks from.

It imports what tasks need, and then waits for requests of its launcher, which it carries out one
after the other. It has one thread, makes no tensor and touches no GPU, and does not run the user's
program. Where another thread runs, for whatever reason, it refuses to fork: a lock that the thread
holds would stay locked in the child for ever. A task then does as `python -m trireme` would. When
the launcher dies, the template ends what the tasks have started; see `orphans.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NoReturn

import msgspec

from trireme.cli import main as run_command
from trireme.errors import ConfigurationError
from trireme.fork.template import BLAS_VARIABLE, ERROR, LIMIT_BYTES, OUTPUT, Answer, ForkRequest
from trireme.launch.config.task_config import TASK_VARIABLE, decode_task, encode_task
from trireme.launch.exit_reason import INTERRUPTED, LEFT
from trireme.launch.process_setup.leaving import leave
from trireme.launch.process_setup.orphans import LAUNCH_VARIABLE, end_all, end_with_parent
from trireme.launch.process_setup.resources import keep_freed_memory

MODULES = (
    "torch",
    "torch._dynamo",  # the first optimizer of a process imports it
    "trireme.session.session",
    "trireme.session.backends.servers",
    "trireme.session.worker.recorder",
    "trireme.ps.server.service",
    "trireme.monitor.recording",
    "trireme.cli.tasks.task",
)
"""What tasks need, in the order of its import."""

ADOPTION_SECONDS = 5.0
_DESCRIPTORS = 16
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_MICROSECONDS = 200e-6


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves one launcher until it is gone."""
    parser = argparse.ArgumentParser(prog="python -m trireme.fork.process", description=__doc__)
    parser.add_argument("--tied-to", type=int, required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--room", help="makes room for the command lines of tasks")
    given = parser.parse_args(arguments)
    # Whoever signals all processes of a job leaves it to the launcher to end this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(given.socket, False)
    _show_command_line(sys.orig_argv[:3])
    if not sys.flags.safe_path:
        sys.path[0] = given.path
    keep_freed_memory(os.environ)
    with socket.socket(fileno=given.socket) as launcher:
        gc.disable()  # all that is made from here on stays
        for name in MODULES:
            importlib.import_module(name)
        with suppress(ConfigurationError):  # it may not be installed
            importlib.import_module("trireme").distribute  # noqa: B018  # is imported by that
        gc.freeze()
        _Template(launcher, given.tied_to).serve()
    end_all(os.environ[LAUNCH_VARIABLE])  # a launcher that ends well has killed this process
    return 0


class _Template:
    """Forks tasks for a launcher, which is at the other end of a connection."""

    def __init__(self, launcher: socket.socket, pid: int) -> None:
        self._launcher = launcher
        self._pid = pid  # the launcher's
        self._own_pid = os.getpid()

    def serve(self) -> None:
        """Serves until the connection is closed."""
        self._answer(Answer(refusal=reason_not_to_fork()))
        while True:
            data, descriptors = self._receive()
            if not data:
                return
            request = msgspec.json.decode(data, type=ForkRequest)
            if refusal := reason_not_to_fork():
                self._answer(Answer(refusal=refusal))
            else:
                self._fork(request, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive(self) -> tuple[bytes, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self._launcher, 1 << 16, _DESCRIPTORS)
        while data and not data.endswith(b"\n") and len(data) < LIMIT_BYTES:
            more = self._launcher.recv(1 << 16)
            if not more:
                return b"", descriptors
            data += more
        return data, descriptors

    def _answer(self, answer: Answer) -> None:
        self._launcher.sendall(msgspec.json.encode(answer) + b"\n")

    def _fork(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        """Forks a task whose parent is the launcher, as the process in between ends."""
        try:
            between = os.fork()
            if between:
                os.waitpid(between, 0)
                return
            if os.fork():
                os._exit(0)
        except OSError as error:
            self._answer(Answer(refusal=f"the system cannot fork: {error.strerror}"))
            if os.getpid() != self._own_pid:
                os._exit(1)
            return
        self._run_task(request, descriptors)

    def _run_task(self, request: ForkRequest, descriptors: Sequence[int]) -> NoReturn:
        status = 1
        try:
            try:
                self._become(request, descriptors)
            except Exception as error:
                self._answer(Answer(refusal=f"a forked task cannot begin: {error!r}"))
                raise
            status = run_command(request.arguments[3:])
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        if status in (0, INTERRUPTED, LEFT):
            leave(status)
        sys.exit(status)

    def _become(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        deadline = time.monotonic() + ADOPTION_SECONDS
        while os.getppid() != self._pid:
            if time.monotonic() > deadline:
                refusal = "the launcher does not become the parent of what it forks"
                self._answer(Answer(refusal=refusal))
                os._exit(1)
            time.sleep(_MICROSECONDS)
        end_with_parent(self._pid)
        os.environ.update(request.environ)
        task = decode_task(request.environ[TASK_VARIABLE])
        for name, descriptor in zip(request.descriptors, descriptors, strict=True):
            if name in (OUTPUT, ERROR):
                os.dup2(descriptor, 1 if name == OUTPUT else 2)
                os.close(descriptor)
            else:
                os.set_inheritable(descriptor, True)
                task = task.inheriting(**{name: descriptor})
        os.environ[TASK_VARIABLE] = encode_task(task)
        sys.orig_argv[:] = request.arguments
        _show_command_line(request.arguments)
        _diverge()
        threads = os.environ.get(BLAS_VARIABLE, "")
        if threads.isdecimal() and int(threads) > 1:
            from threadpoolctl import ThreadpoolController

            ThreadpoolController().select(internal_api="openblas").limit(limits=int(threads))
        self._answer(Answer(pid=os.getpid()))
        self._launcher.close()
        gc.enable()


def reason_not_to_fork() -> str:
    """Returns why this process must not fork, such as several threads; "" if it may."""
    threads = 0
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        threads = next((int(line.split()[1]) for line in file if line.startswith("Threads:")), 0)
    if threads != 1:
        return f"its process has {threads or 'unknown'} threads after the import of torch"
    if any(file.startswith(_GPU_FILES) for file in _open_files()):
        return "the import of torch has opened a GPU, which a forked process cannot use"
    return ""


def _open_files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def _diverge() -> None:
    """Makes different what forked processes would have in common, and new ones have not."""
    random.seed()
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


def _show_command_line(words: Sequence[str]) -> None:
    """Replaces the command line of this process in `ps` and `/proc/PID/cmdline`.

    The new one is cut where it is longer than the one with which the process was started. The
    environment, which the kernel keeps behind it, and shows too, stays.
    """
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
        size = end - start
        if start and size > 0:
            line = b"\0".join(word.encode("utf-8", "surrogateescape") for word in words)
            # The last byte stays 0: otherwise the kernel would show what follows as well.
            ctypes.memmove(start, line[: size - 1].ljust(size, b"\0"), size)


if __name__ == "__main__":
    sys.exit(main())

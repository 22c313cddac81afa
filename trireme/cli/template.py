"""The program of the process that a launcher forks its tasks from.

It imports what tasks need, and then waits for requests of its launcher, which it carries out one
after the other. It has one thread, makes no tensor and touches no GPU, and does not run the user's
program. Where another thread runs, for whatever reason, it refuses to fork: a lock that the thread
holds would stay locked in the child for ever.

A task does then as `python -m trireme` with its command line would.

When the launcher dies, the template ends what the tasks have started; see `orphans.py`.
"""

from __future__ import annotations

import argparse
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

from trireme.cli.dispatch import main as run_command
from trireme.launch.config.task_config import TASK_VARIABLE, decode_task, encode_task
from trireme.launch.exit_reason import INTERRUPTED, LEFT
from trireme.launch.forking.fork_request import (
    ERROR,
    LIMIT_BYTES,
    OUTPUT,
    Answer,
    Forked,
    ForkRequest,
    Ready,
    Refused,
)
from trireme.launch.process_setup.blas import BLAS_VARIABLE, set_blas_threads
from trireme.launch.process_setup.command_line import show_command_line
from trireme.launch.process_setup.leaving import leave
from trireme.launch.process_setup.orphans import LAUNCH_VARIABLE, end_all, end_with_parent
from trireme.launch.process_setup.resources import keep_freed_memory

MODULES = (
    "torch",
    "torch._dynamo",  # the first optimizer of a process imports it
    "trireme.session.session",
    "trireme.session.distribute",
    "trireme.session.backends.parameter_server",
    "trireme.session.worker.recorder",
    "trireme.ps.server.service",
    "trireme.monitor.records",
    "trireme.cli.task",
)
"""What tasks need, in the order of its import."""

ADOPTION_SECONDS = 5.0
_DESCRIPTORS = 16
_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_MICROSECONDS = 200e-6


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves one launcher until it is gone."""
    parser = argparse.ArgumentParser(prog="python -m trireme.cli.template", description=__doc__)
    parser.add_argument("--tied-to", type=int, required=True)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--room", help="makes room for the command lines of tasks")
    given = parser.parse_args(arguments)
    # Whoever signals all processes of a job leaves it to the launcher to end this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(given.socket, False)
    show_command_line(sys.orig_argv[:3])
    if not sys.flags.safe_path:
        sys.path[0] = given.path
    keep_freed_memory(os.environ)
    with socket.socket(fileno=given.socket) as launcher:
        gc.disable()  # all that is made from here on stays
        for name in MODULES:
            importlib.import_module(name)
        gc.freeze()
        _Template(launcher, given.tied_to).serve()
    end_all(os.environ[LAUNCH_VARIABLE])  # a launcher that ends well has killed this process
    return 0


class _Template:
    """Forks tasks for a launcher."""

    def __init__(self, launcher: socket.socket, pid: int) -> None:
        self._launcher = launcher
        self._pid = pid

    def serve(self) -> None:
        """Serves until the connection is closed."""
        refusal = reason_not_to_fork()
        self._send(Ready() if refusal is None else refusal)
        while True:
            data, descriptors = self._receive()
            if not data:
                return
            request = msgspec.json.decode(data, type=ForkRequest)
            refusal = reason_not_to_fork()
            if refusal is None:
                self._fork(request, descriptors)
            else:
                self._send(refusal)
            for descriptor in descriptors:
                os.close(descriptor)

    def _receive(self) -> tuple[bytes, list[int]]:
        """Returns a request, empty at the end, and the descriptors that come with it."""
        data, descriptors, _, _ = socket.recv_fds(self._launcher, 1 << 16, _DESCRIPTORS)
        while data and not data.endswith(b"\n") and len(data) < LIMIT_BYTES:
            more = self._launcher.recv(1 << 16)
            if not more:
                return b"", descriptors
            data += more
        return data, descriptors

    def _send(self, answer: Answer) -> None:
        self._launcher.sendall(msgspec.json.encode(answer) + b"\n")

    def _fork(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        """Forks a task that has the launcher as its parent."""
        try:
            between = os.fork()
        except OSError as error:
            self._send(Refused(f"the system cannot fork: {error.strerror}"))
            return
        if between == 0:
            self._fork_again(request, descriptors)
        os.waitpid(between, 0)

    def _fork_again(self, request: ForkRequest, descriptors: Sequence[int]) -> NoReturn:
        try:
            if os.fork():
                os._exit(0)
        except OSError as error:
            self._send(Refused(f"the system cannot fork: {error.strerror}"))
            os._exit(1)
        status = 1
        try:
            try:
                self._become(request, descriptors)
            except Exception as error:
                self._send(Refused(f"a forked task cannot begin: {error!r}"))
                raise
            kept = frozenset(sys.modules)
            status = run_command(request.arguments[3:])
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        if status in (0, INTERRUPTED, LEFT):
            leave(status, kept)
        sys.exit(status)

    def _become(self, request: ForkRequest, descriptors: Sequence[int]) -> None:
        """Makes this process what the launcher would have started."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        deadline = time.monotonic() + ADOPTION_SECONDS
        while os.getppid() != self._pid:
            if time.monotonic() > deadline:
                self._send(Refused("the launcher does not become the parent of what it forks"))
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
        show_command_line(request.arguments)
        _diverge()
        set_blas_threads(os.environ.get(BLAS_VARIABLE, ""))
        self._send(Forked(os.getpid()))
        self._launcher.close()
        gc.enable()


def reason_not_to_fork() -> Refused | None:
    """Returns why this process must not fork; None if it may.

    It may if it has one thread, and has no GPU open.
    """
    threads = 0
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        threads = next((int(line.split()[1]) for line in file if line.startswith("Threads:")), 0)
    if threads != 1:
        return Refused(f"its process has {threads or 'unknown'} threads after the import of torch")
    if any(file.startswith(_GPU_FILES) for file in _open_files()):
        return Refused("the import of torch has opened a GPU, which a forked process cannot use")
    return None


def _open_files() -> Iterator[str]:
    """Yields the paths of the files that this process has open."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            yield os.readlink(f"/proc/self/fd/{descriptor}")


def _diverge() -> None:
    """Makes different what forked processes would have in common, and new ones have not."""
    random.seed()
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        numbers.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    sys.exit(main())

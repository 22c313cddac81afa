"""One task as a child process: its output line by line, its signals, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trireme.launch.log_file import LogFile

__all__ = ["Pipe", "TaskProcess"]

CHUNK_BYTES = 1 << 16
LINE_BYTES = 1 << 20
LAST_LINES = 12
FINAL_CHUNKS = 64


@dataclass(slots=True)
class Pipe:
    """One of a task's two output streams.

    Attributes:
        fd: the end to read from.
        error: whether it is standard error.
        partial: what came after the last line end.
    """

    fd: int
    error: bool
    partial: bytes = b""

    def lines(self, data: bytes) -> list[bytes]:
        """Takes bytes in and returns the lines that they complete.

        Of text that carriage returns overwrite, such as a progress bar, only the last state counts.
        """
        *complete, partial = (self.partial + data).split(b"\n")
        self.partial = partial if len(partial) <= LINE_BYTES else _last_state(partial)[-LINE_BYTES:]
        return [_last_state(line) for line in complete]

    def remainder(self) -> list[bytes]:
        """Returns a last line that had no line end, if there is one."""
        line, self.partial = self.partial, b""
        return [_last_state(line)] if line else []


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class TaskProcess:
    """A running task, leader of a session and process group of its own.

    Ctrl-C on the terminal does not reach it: its launcher passes signals on. Its output goes line
    by line into its log and to `emit(line, error)`; `warn(text)` is called when the log cannot be
    written.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        log: Path,
        emit: Callable[[str, bool], None],
        warn: Callable[[str], None] = lambda text: None,
        pass_fds: Sequence[int] = (),
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._emit = emit
        self._lines = 0
        self._log = LogFile(log, warn)
        self._process = subprocess.Popen(
            command,
            env=dict(environ),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
        self.pipes = [
            self._pipe(self._process.stdout, False),
            self._pipe(self._process.stderr, True),
        ]

    @staticmethod
    def _pipe(stream: IO[bytes] | None, error: bool) -> Pipe:
        assert stream is not None  # by PIPE
        os.set_blocking(stream.fileno(), False)
        return Pipe(stream.fileno(), error)

    @property
    def pid(self) -> int:
        """The process id, which is also the process group's."""
        return self._process.pid

    def read(self, pipe: Pipe) -> bool:
        """Reads without waiting; returns False when the stream has ended."""
        return self._read(pipe) != 0

    def poll(self) -> int | None:
        """Returns the exit status, or minus the number of a signal; None while the task runs."""
        return self._process.poll()

    def used(self) -> float:
        """Returns how much the task has done: seconds of a core, and a second for each line."""
        return self._lines + _processor_seconds(self.pid)

    def terminate(self) -> None:
        """Asks the task to end, but not its children."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the task and its children at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def finish(self) -> None:
        """Shows the remaining output of an ended task, kills its children, closes its files."""
        self.kill()  # a process group outlives its leader
        for pipe in self.pipes:
            # A process outside the group may hold the pipe and write on: read a bounded amount.
            for _ in range(FINAL_CHUNKS):
                if not self._read(pipe):
                    break
            self._show(pipe.remainder(), pipe.error)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        self._log.close()

    def _read(self, pipe: Pipe) -> int | None:
        """Returns how many bytes were read: 0 at the end, None if there are none now."""
        try:
            data = os.read(pipe.fd, CHUNK_BYTES)
        except BlockingIOError:
            return None
        if data:
            self._show(pipe.lines(data), pipe.error)
        return len(data)

    def _show(self, lines: Sequence[bytes], error: bool) -> None:
        self._lines += len(lines)
        for line in lines:
            self._log.write(line)
            text = line.decode("utf-8", errors="replace")
            self.last_lines.append(text)
            self._emit(text, error)


def _processor_seconds(pid: int) -> float:
    """Returns the core seconds that a process and its children have used; 0 if it is gone."""
    import psutil  # rarely needed, and slow to load

    total = 0.0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total

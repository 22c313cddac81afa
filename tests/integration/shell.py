"""Commands as a user gives them at a shell, with what they print, and what they leave behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import PYTHONPATH, python_path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
TRIREME = (sys.executable, "-m", "trireme")
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SECONDS = 240.0
"""After this a command is taken for hung. Importing torch takes seconds of it on a busy machine."""

_MARK = "TRIREME_INTEGRATION_TEST"


@dataclass(frozen=True)
class Ended:
    """What came of a command.

    Attributes:
        status: its exit status; minus the number of a signal that killed it.
        out, err: what it printed; at a terminal, all of it is `out`.
        seconds: how long it took.
    """

    status: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """All that it printed."""
        return self.out + self.err


class Running:
    """A command that runs. Its output is read as it comes."""

    def __init__(self, process: subprocess.Popen[bytes], streams: dict[str, int]) -> None:
        self.process = process
        self._began = time.monotonic()
        self._text = dict.fromkeys(("out", "err"), "")
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=(name, fd), daemon=True)
            for name, fd in streams.items()
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def until(self, pattern: str, seconds: float = SECONDS) -> re.Match[str]:
        """Waits until something was printed that matches.

        Raises:
            AssertionError: it was not, and the command has ended, or the time has.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                found = re.search(pattern, self._text["out"] + self._text["err"])
                if found:
                    return found
                left = deadline - time.monotonic()
                gone = not any(reader.is_alive() for reader in self._readers)
                assert left > 0 and not gone, f"no {pattern!r} in:\n{self._all()[-4000:]}"
                self._changed.wait(min(left, 1.0))

    def until_there(self, path: Path, seconds: float = SECONDS) -> None:
        """Waits until there is a file.

        Raises:
            AssertionError: the command has ended without it, or the time has.
        """
        deadline = time.monotonic() + seconds
        while not path.exists():
            running = self.process.poll() is None and time.monotonic() < deadline
            assert running, f"no {path}:\n{self._all()[-4000:]}"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def ended(self, seconds: float = SECONDS, progress: str = "") -> Ended:
        """Waits for the end.

        Args:
            seconds: until then, or from the last line with `progress` on, where that is given.
            progress: what lines have in them that say that the command has come further.

        Raises:
            AssertionError: it does not end in time.
        """
        made = -1
        while True:
            try:
                status = self.process.wait(seconds)
                break
            except subprocess.TimeoutExpired:
                before, made = made, self._all().count(progress) if progress else -1
                if made <= before:
                    last = self._all()[-4000:]
                    raise AssertionError(f"still runs after {seconds:.0f} s:\n{last}") from None
        took = time.monotonic() - self._began
        for reader in self._readers:
            reader.join(10.0)
        return Ended(status, self._text["out"], self._text["err"], took)

    def _all(self) -> str:
        return self._text["out"] + self._text["err"]

    def _read(self, name: str, fd: int) -> None:
        with suppress(OSError):  # a terminal whose last process has ended says EIO
            while data := os.read(fd, 1 << 16):
                with self._changed:
                    self._text[name] += data.decode(errors="replace").replace("\r\n", "\n")
                    self._changed.notify_all()
        with suppress(OSError):
            os.close(fd)
        with self._changed:
            self._changed.notify_all()


class Shell:
    """Starts commands in a directory. Nothing of them may be left when it is closed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._mark = uuid.uuid4().hex
        self._shared_before = _shared_memory()
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TRIREME_")}
        self._environ = {
            **kept,
            _MARK: self._mark,
            "PYTHONPATH": PYTHONPATH,
            "OMP_NUM_THREADS": "1",
            "XDG_CONFIG_HOME": str(directory / "config"),
            "NO_COLOR": "1",
        }
        self._terminals: list[int] = []

    def start(
        self,
        *words: object,
        environ: dict[str, str] | None = None,
        command: Sequence[str] = TRIREME,
    ) -> Running:
        """Starts `trireme`, or another command, with these words."""
        process = subprocess.Popen(
            [*command, *map(str, words)],
            cwd=self.directory,
            env={**self._environ, "PYTHONPATH": python_path([*command, *words]), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        streams = {"out": process.stdout, "err": process.stderr}
        return Running(process, {name: os.dup(s.fileno()) for name, s in streams.items()})

    def start_at_terminal(self, *words: object) -> tuple[Running, int]:
        """Starts `trireme` at a pseudo-terminal; returns the terminal's other side too."""
        ours, theirs = os.openpty()
        process = subprocess.Popen(
            # A session of its own, whose terminal is this one: Ctrl-C reaches its foreground group.
            [sys.executable, "-c", _AT_TERMINAL, *TRIREME, *map(str, words)],
            cwd=self.directory,
            env=self._environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._terminals.append(ours)
        return Running(process, {"out": os.dup(ours)}), ours

    def run(self, *words: object, environ: dict[str, str] | None = None) -> Ended:
        """Runs `trireme` with these words to its end.

        Raises:
            AssertionError: it needs a plug-in that is not installed; whatever runs here is ended.
        """
        ended = self.start(*words, environ=environ).ended()
        if "is in a plug-in that is not installed" in " ".join(ended.err.split()):
            self.close()
            raise AssertionError(ended.err)
        return ended

    def processes(self) -> list[psutil.Process]:
        """Returns what runs of what was started here, down to the last descendant."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def assert_nothing_left(self) -> None:
        """Checks that no process and no shared memory is left."""
        left = self.processes()
        assert not left, f"left behind: {[' '.join(p.cmdline()) for p in left]}"
        deadline = time.monotonic() + 10.0
        while shared := self._abandoned():
            # Another test's, on its way between being made and being mapped, does not stay so.
            assert time.monotonic() < deadline, f"shared memory left behind: {shared}"
            time.sleep(0.1)

    def _abandoned(self) -> list[str]:
        """Returns names of shared memory that came up meanwhile and that no process uses."""
        new = _shared_memory().items() - self._shared_before.items()
        mapped = set(_mapped()) if new else set()
        return [name for name, number in new if number not in mapped]

    def close(self) -> None:
        """Ends what still runs, so that a failed test does not spoil the next."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        while self._terminals:
            with suppress(OSError):
                os.close(self._terminals.pop())

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return (
                process.environ().get(_MARK) == self._mark
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False


_AT_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def _shared_memory() -> dict[str, int]:
    """The numbers of the files of shared memory, by their names."""
    found = {}
    for entry in Path("/dev/shm").glob("*"):
        with suppress(FileNotFoundError):
            found[entry.name] = entry.stat().st_ino
    return found


def _mapped() -> Iterator[int]:
    """The numbers of files of shared memory that some process of this machine uses.

    A semaphore of `multiprocessing` is mapped under another name, which is gone by then.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    yield int(line.split()[4])

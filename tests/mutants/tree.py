"""Copies of the repository in which files may be changed, and processes that run tests there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Child:
    """A process that runs tests in a tree, in a group of its own.

    Attributes:
        pid: the process, and its group.
        until: when it has run too long, by the monotonic clock.
    """

    pid: int
    until: float

    def ended(self) -> int | None:
        """Returns the status that it ended with; None while it runs; kills what runs too long.

        A negative status is the signal that ended it.
        """
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0 and time.monotonic() > self.until:
            self.kill()
            pid, status = os.waitpid(self.pid, 0)
        if pid == 0:
            return None
        self.kill()  # what it has started and not ended
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """Ends it, and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Tree:
    """A copy of the files that git knows, and of new ones that it does not ignore."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def copied(cls, source: Path, root: Path) -> Tree:
        """Copies a working tree to a new folder."""
        told = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=source,
            capture_output=True,
            check=True,
        )
        for name in filter(None, told.stdout.decode().split("\0")):
            if (source / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, root / name)
        return cls(root)

    def output(self) -> str:
        """Returns the end of what the last process has written."""
        return (self.root / "output.log").read_text(encoding="utf-8", errors="replace")[-4000:]

    def again(self, root: Path) -> Tree:
        """Returns a copy of this copy, with what Python has compiled in it."""
        shutil.copytree(self.root, root)
        return Tree(root)

    @contextmanager
    def changed(self, path: str, text: str) -> Iterator[None]:
        """Puts another text into a file for a while."""
        file = self.root / path
        kept, times = file.read_bytes(), file.stat()
        file.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            file.write_bytes(kept)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as it was compiled

    def fork(self, body: Callable[[], int], *, limit: float, compiles: bool = False) -> Child:
        """Runs a function in a copy of this process that finds the program in this tree.

        What this process has imported is there already, but for the program and its tests.

        Args:
            body: what to run; returns the status to end with.
            limit: after how many seconds it is killed.
            compiles: whether Python may keep what it compiles.
        """
        until = time.monotonic() + limit
        pid = os.fork()
        if pid:
            return Child(pid, until)
        status = 70
        try:
            os.setsid()
            self._enter(compiles=compiles)
            status = body()
        finally:
            os._exit(status)

    def _enter(self, *, compiles: bool) -> None:
        silent = os.open(os.devnull, os.O_RDWR)
        output = os.open(self.root / "output.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor, onto in ((silent, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, onto)
        os.chdir(self.root)
        os.environ["PYTHONPATH"] = str(self.root)
        sys.dont_write_bytecode = not compiles
        if not compiles:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.path.insert(0, str(self.root))
        for name in [*sys.modules]:
            if name.split(".")[0] in ("tests", "trireme"):
                del sys.modules[name]

"""The coordinator's report of the job's members to its launcher: a file, renewed every second.

The launcher sees which of its processes live. Only the coordinator hears which of them respond: a
process that was stopped, or hangs, lives on.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from trireme.atomic_file import write_atomically

__all__ = ["LostTask", "MembershipReport", "MembershipReportReader", "MembershipReportWriter"]

TOUCH_SECONDS = 1.0
CHECK_SECONDS = 0.1


class LostTask(msgspec.Struct, frozen=True):
    """A task that the coordinator has given up.

    Attributes:
        name: the task.
        pid: the id of its process.
        reason: why it was given up, such as `it sent nothing for 10.2 s`.
    """

    name: str
    pid: int
    reason: str


class MembershipReport(msgspec.Struct, frozen=True):
    """The members of a job.

    Attributes:
        joined: whether any worker ever joined.
        formed: whether all tasks joined at some time, so that the job began.
        lost: the tasks that are given up now.
    """

    joined: bool = False
    formed: bool = False
    lost: tuple[LostTask, ...] = ()


class MembershipReportWriter:
    """Keeps the file up to date, on a thread of its own, while the block runs.

    The file's time of change moves every second even if its content does not, so that the reader
    sees that the coordinator's process responds.

    Args:
        path: the file.
        current: returns the report as of now.
    """

    def __init__(self, path: Path, current: Callable[[], MembershipReport]) -> None:
        self._path = path
        self._current = current
        self._written: MembershipReport | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attendance", daemon=True)

    def __enter__(self) -> MembershipReportWriter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        checks = 0
        while not self._ended.wait(CHECK_SECONDS):
            checks += 1
            self._renew(touch=checks % round(TOUCH_SECONDS / CHECK_SECONDS) == 0)
        self._renew(touch=True)

    def _renew(self, *, touch: bool) -> None:
        now = self._current()
        if now != self._written:
            with contextlib.suppress(OSError):  # the next check tries again
                self._write(msgspec.json.encode(now))
                self._written = now
        if touch:
            try:
                os.utime(self._path)  # needs no room on a full disk
            except OSError:
                self._written = None  # the file is gone, perhaps with its directory

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(self._path, content)
        except OSError:
            with self._path.open("r+b") as file:  # on a full disk the file's own room is enough
                file.write(content)
                file.truncate()


class MembershipReportReader:
    """Reads the file whenever it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0

    def news(self) -> MembershipReport | None:
        """Returns the report if it has changed or been renewed since the last call; else None."""
        try:
            changed = self._path.stat().st_mtime_ns
        except OSError:
            return None
        if changed == self._seen:
            return None
        self._seen = changed
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=MembershipReport)
        except (OSError, msgspec.MsgspecError):
            return None

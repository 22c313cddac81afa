"""Who takes part in a job, as its coordinator tells its launcher: a file, renewed every second.

A launcher sees which of its processes live, and only the coordinator hears which of them do
anything: a process that was stopped, or hangs, lives on.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

__all__ = ["Attendance", "AttendanceFile", "AttendanceReader", "Lost"]

BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.1


class Lost(msgspec.Struct, frozen=True):
    """A task that the coordinator has given up.

    Attributes:
        name: the task.
        pid: the process that it was.
        reason: why, such as `it said nothing for 10.2 s`.
    """

    name: str
    pid: int
    reason: str


class Attendance(msgspec.Struct, frozen=True):
    """Who takes part.

    Attributes:
        joined: whether any worker ever did.
        formed: whether all tasks once did, and the job began.
        lost: the tasks that are given up now.
    """

    joined: bool = False
    formed: bool = False
    lost: tuple[Lost, ...] = ()


class AttendanceFile:
    """Keeps the file up to date, on a thread of its own, while the block runs.

    Its time of change moves every second even where nothing else does: so its reader sees that
    the process of the coordinator goes on.

    Args:
        path: the file.
        look: returns who takes part now.
    """

    def __init__(self, path: Path, look: Callable[[], Attendance]) -> None:
        self._path = path
        self._look = look
        self._written: Attendance | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attendance", daemon=True)

    def __enter__(self) -> AttendanceFile:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        looks = 0
        while not self._ended.wait(LOOK_SECONDS):
            looks += 1
            self._renew(beat=looks % round(BEAT_SECONDS / LOOK_SECONDS) == 0)
        self._renew(beat=True)

    def _renew(self, *, beat: bool) -> None:
        now = self._look()
        if now != self._written:
            with contextlib.suppress(OSError):  # the next look tries again
                self._write(msgspec.json.encode(now))
                self._written = now
        if beat:
            try:
                os.utime(self._path)  # which needs no room on a full disk
            except OSError:
                self._written = None  # the file is gone, with its directory perhaps

    def _write(self, content: bytes) -> None:
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            beside.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            with self._path.open("r+b") as there:  # the room that it has is enough, on a full disk
                there.write(content)
                there.truncate()


class AttendanceReader:
    """Reads the file where it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = 0

    def news(self) -> Attendance | None:
        """Returns who takes part, if the coordinator has said so since the last time."""
        try:
            changed = self._path.stat().st_mtime_ns
        except OSError:
            return None
        if changed == self._seen:
            return None
        self._seen = changed
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Attendance)
        except (OSError, msgspec.MsgspecError):
            return None

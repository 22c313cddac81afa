"""The pipe by which a task says why it ends: a line of JSON to its launcher.

The launcher sees how its processes end. Only a task itself knows why it failed.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from trireme.launch.exit_reason import ExitReason


def decode_reason(line: bytes) -> ExitReason | None:
    """Returns the reason in a line, or None if there is none that can be read."""
    try:
        return msgspec.json.decode(line, type=ExitReason)
    except (msgspec.MsgspecError, UnicodeError):
        return None


class LauncherPipe:
    """A task's end of the pipe to its launcher. Any thread may send."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._file = os.fdopen(fd, "wb")  # as long as this process

    def send(self, reason: ExitReason) -> None:
        """Sends why this task ends, unless the launcher is gone. Then this task ends soon."""
        with contextlib.suppress(OSError):
            self._file.write(msgspec.json.encode(reason) + b"\n")
            self._file.flush()

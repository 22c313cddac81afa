"""What a task tells its launcher: messages in a pipe that it inherits, each a line of JSON.

The launcher sees which of its processes live, and how they end. Only a task itself knows why it
failed, and only the coordinator hears which tasks respond: a process that was stopped, or hangs,
lives on.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from trireme.launch.exit_reason import ExitReason

REPEAT_SECONDS = 1.0
CHECK_SECONDS = 0.1


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The coordinator listens.

    Attributes:
        address: its address, with its scheme.
    """

    address: str


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


class MembershipReport(msgspec.Struct, frozen=True, tag="members"):
    """The members of a job, as its coordinator reports them every second.

    Attributes:
        joined: whether any worker ever joined.
        formed: whether all tasks joined at some time, so that the job began.
        lost: the tasks that are given up now.
        wanted: the names of the tasks that the job is to have, and that have not left.
        dismissed: the names of the tasks that are to leave because the job was made smaller, or
            have left for that.
        requests: how often somebody has asked for other numbers of tasks.
    """

    joined: bool = False
    formed: bool = False
    lost: tuple[LostTask, ...] = ()
    wanted: tuple[str, ...] = ()
    dismissed: tuple[str, ...] = ()
    requests: int = 0


TaskMessage = Listening | MembershipReport | ExitReason


def decode_message(line: bytes) -> TaskMessage | None:
    """Returns the message in a line, or None if there is none that can be read."""
    try:
        message: TaskMessage = msgspec.json.decode(line, type=TaskMessage)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return message


class LauncherPipe:
    """A task's end of the pipe to its launcher. Any thread may send.

    Args:
        fd: the inherited descriptor. The task's own children do not inherit it.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._file = os.fdopen(fd, "wb")  # as long as this process

    def send(self, message: TaskMessage) -> None:
        """Sends a message, unless the launcher is gone. Then this task ends soon."""
        with contextlib.suppress(OSError):
            self._file.write(msgspec.json.encode(message) + b"\n")
            self._file.flush()


@contextlib.contextmanager
def membership_reports(
    pipe: LauncherPipe, current: Callable[[], MembershipReport]
) -> Iterator[None]:
    """Reports a job's members to the launcher, on a thread of its own, while the block runs.

    A report that has not changed is repeated every second, so that the launcher sees that the
    coordinator's process responds.

    Args:
        pipe: the pipe to the launcher.
        current: returns the report as of now.
    """
    ended = threading.Event()

    def run() -> None:
        sent, sent_at, last = None, 0.0, False
        while not last:
            last = ended.wait(CHECK_SECONDS)
            report, now = current(), time.monotonic()
            if last or report != sent or now >= sent_at + REPEAT_SECONDS:
                pipe.send(report)
                sent, sent_at = report, now

    thread = threading.Thread(target=run, name="membership-reports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=2.0)

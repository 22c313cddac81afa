"""Why a task ended, which it tells its launcher: an exit status does not say which failed first."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import Literal

import msgspec

from trireme.errors import (
    ConnectionBroken,
    ConnectionRefused,
    ConnectTimeout,
    CorruptedValues,
    JobFailed,
    PeerClosed,
    Rejected,
    TriremeError,
    UsageError,
    WaitTimeout,
    WireError,
    WireTimeout,
)
from trireme.printable import printable

INTERRUPTED = 130  # the exit status of a task, or of a job, that was stopped and has saved

LEFT = 143  # the exit status of a worker that left at SIGTERM, while its job goes on: 128 + 15

LONGEST_TEXT = 4096  # of what an exception says, in characters

Kind = (
    Literal["usage", "error", "exception", "exit", "signal", "hung", "gone", "left", "silent"]
    | Literal["victim", "corrupted"]
)

_VICTIMS = (
    JobFailed,
    WaitTimeout,
    ConnectTimeout,
    ConnectionRefused,
    ConnectionBroken,
    PeerClosed,
    WireTimeout,
)
"""What a task raises when another task failed or did not come."""

_GONE = re.compile(
    r"closed by peer|connection (reset|refused|closed)|broken pipe|socket error|"
    r"peer (closed|has)|ncclremoteerror|nccl (remote|communicator)|"
    r"failed to recv|recvvalue failed|sendbytes failed|remote process exited",
    re.IGNORECASE,
)


def says_peer_is_gone(error: BaseException) -> bool:
    """Returns whether torch.distributed raised this because another process is gone."""
    distributed = type(error).__name__.startswith("Dist") or "gloo" in str(error).lower()
    return isinstance(error, RuntimeError) and distributed and bool(_GONE.search(str(error)))


class ExitReason(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Why a task ended otherwise than well.

    Its kind is `usage`: it was asked for something that cannot be; `error`: another of Trireme's
    errors; `exception`: anything else that was raised; `exit`: it ended with a status other than 0;
    `signal`: it was killed; `hung`: its launcher killed it; `gone`: its host, or what watches it
    there, is; `left`: a worker left when it was asked to; `silent`: one ended with status 0 and did
    not leave; `victim`: another task failed; `corrupted`: values have changed by themselves.
    """

    kind: Kind
    summary: str  # one line, such as `ValueError: boom (train.py:12)`
    at: float = msgspec.field(default_factory=time.time)  # in seconds since 1970
    loss: str = ""  # what the job loses with this failure, in a sentence, where it knows of a loss
    traceback: str = ""  # the end of the program's

    @property
    def sudden(self) -> bool:
        """Whether the task was killed or asked to end, and did not fail by itself."""
        return self.kind in ("signal", "hung", "gone", "left", "silent")

    @property
    def worth_a_restart(self) -> bool:
        """Whether the same task may succeed when it is started again."""
        return self.kind not in ("usage", "victim", "corrupted")


# Of workers whose programs ended well: before the job had begun, though the others waited; in the
# middle of training; and all of them without any having joined.
ENDED_TOO_EARLY = ExitReason(
    kind="usage",
    summary="its program ended before the job had begun: the others waited for it. Does it open a "
    "trireme.Session, or call trireme.distribute, on every worker?",
    at=0.0,
)
NEVER_LEFT = ExitReason(
    kind="silent",
    summary="ended with status 0 in the middle of training, and has not left the job. Does its "
    "program, or a library, call os._exit?",
    at=0.0,
)
NO_WORKER_JOINED = ExitReason(
    kind="usage",
    summary="the program ended, and no worker had joined the job: nothing was trained. Does it "
    "open a trireme.Session, or call trireme.distribute?",
    at=0.0,
)


def describe(error: BaseException, location: str = "") -> ExitReason:
    """Returns the reason of a task that ended by `error`, raised at `location` if it is known."""
    text = printable(str(error)[:LONGEST_TEXT], keep="\n").strip().splitlines()
    first = text[0] if text else ""
    if isinstance(error, CorruptedValues) and not error.others_go_on:
        return ExitReason(kind="corrupted", summary=first)
    if isinstance(error, TriremeError):
        loss = error.loss if isinstance(error, JobFailed | WireError) else ""
        refused = isinstance(error, UsageError | Rejected)  # a server would reject it again
        kind: Kind = "usage" if refused else "victim" if isinstance(error, _VICTIMS) else "error"
        return ExitReason(kind=kind, summary=first, loss=loss)
    if isinstance(error, SystemExit):
        return ExitReason(kind="exit", summary=f"sys.exit({error.code!r})")
    if says_peer_is_gone(error):
        return ExitReason(kind="victim", summary=first)
    name = type(error).__name__
    summary = (f"{name}: {first}" if first else name) + (f" ({location})" if location else "")
    return ExitReason(kind="exception", summary=summary)


def describe_status(status: int) -> ExitReason:
    """Returns the reason of a process that left none, from its status as `subprocess` has it."""
    if status == LEFT:
        return ExitReason(kind="left", summary="SIGTERM has asked it to")
    if status >= 0:
        return ExitReason(kind="exit", summary=f"ended with status {status}")
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-status, f"signal {-status}")
    return ExitReason(kind="signal", summary=f"killed by {name}")


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

"""Why a task ended: a small file that it leaves for its launcher.

An exit status is one number. It cannot tell which of several tasks failed first, and which ended
only because another one failed.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path
from typing import Literal

import msgspec

from trireme.atomic_file import write_atomically
from trireme.errors import (
    ConnectionBroken,
    ConnectionRefused,
    ConnectTimeout,
    JobFailed,
    PeerClosed,
    Rejected,
    TriremeError,
    UsageError,
    WaitTimeout,
    WireError,
    WireTimeout,
)

__all__ = [
    "ExitReason",
    "describe",
    "describe_status",
    "read_exit_reason",
    "says_peer_is_gone",
    "signal_name",
    "write_exit_reason",
]

Kind = Literal["usage", "error", "exception", "exit", "signal", "hung", "victim"]

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


class ExitReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a task ended otherwise than well.

    Attributes:
        kind: `usage`: it was asked for something that cannot be; `error`: another of Trireme's
            errors; `exception`: anything else that was raised; `exit`: it ended with a status
            other than 0; `signal`: it was killed; `hung`: its launcher killed it because it no
            longer did anything; `victim`: another task failed.
        summary: one line, such as `ValueError: boom (train.py:12)`.
        at: the time of day in seconds since 1970.
        loss: what the job loses with this failure, in a sentence; "" where this task does not
            know of a loss.
    """

    kind: Kind
    summary: str
    at: float
    loss: str = ""

    @property
    def sudden(self) -> bool:
        """Whether the task was killed, and did not fail by itself."""
        return self.kind in ("signal", "hung")

    @property
    def worth_a_restart(self) -> bool:
        """Whether the same task may succeed when it is started again."""
        return self.kind not in ("usage", "victim")


def describe(error: BaseException, location: str = "") -> ExitReason:
    """Returns the reason of a task that ended by `error`, raised at `location` if it is known."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    if isinstance(error, TriremeError):
        loss = error.loss if isinstance(error, JobFailed | WireError) else ""
        return ExitReason(kind=_kind(error), summary=first, at=time.time(), loss=loss)
    if isinstance(error, SystemExit):
        return ExitReason(kind="exit", summary=f"sys.exit({error.code!r})", at=time.time())
    if says_peer_is_gone(error):
        return ExitReason(kind="victim", summary=first, at=time.time())
    name = type(error).__name__
    summary = (f"{name}: {first}" if first else name) + (f" ({location})" if location else "")
    return ExitReason(kind="exception", summary=summary, at=time.time())


def describe_status(status: int) -> ExitReason:
    """Returns the reason of a process that left none, from its exit status alone.

    Args:
        status: as `subprocess` has it: minus the number of the signal that killed the process.
    """
    if status < 0:
        return ExitReason(
            kind="signal", summary=f"killed by {signal_name(-status)}", at=time.time()
        )
    return ExitReason(kind="exit", summary=f"ended with status {status}", at=time.time())


def signal_name(number: int) -> str:
    """Returns a signal's name, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kind(error: TriremeError) -> Kind:
    if isinstance(error, UsageError | Rejected):  # a server would reject it again
        return "usage"
    return "victim" if isinstance(error, _VICTIMS) else "error"


def write_exit_reason(path: Path, reason: ExitReason) -> None:
    """Writes a reason. If that fails, as on a full disk, the launcher uses the exit status."""
    with contextlib.suppress(OSError):
        write_atomically(path, msgspec.json.encode(reason))


def read_exit_reason(path: Path) -> ExitReason | None:
    """Returns the reason that a task left, or None if it left none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExitReason)
    except (OSError, msgspec.MsgspecError):
        return None

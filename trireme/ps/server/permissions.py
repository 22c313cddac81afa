"""Who may say what to a parameter server: by role, and each for itself alone.

The secret of a job proves that a process belongs to it, and the handshake which task it says it is.
Here what it says is held against that: a worker speaks for no other worker, nor for a start of
itself that is not its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trireme.ps.messages import (
    Attach,
    Collect,
    Cut,
    Drain,
    Freeze,
    LastPushes,
    Lease,
    LendMemory,
    Load,
    Pull,
    Push,
    PushesCommitted,
    PushesStaged,
    Retire,
    RoundClose,
    RoundReady,
    SetEnd,
    Share,
    Status,
    StopJob,
    Thaw,
    Trace,
)
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

__all__ = ["refusal"]

_OF_A_WORKER = (Attach, Push, Pull, Lease, Retire, Load, Share)
"""What names the worker that says it, and which start of it."""

_SPEAKERS: Mapping[type[Message], str] = {
    **dict.fromkeys(_OF_A_WORKER, "worker"),
    **dict.fromkeys((StopJob, SetEnd, Collect, Drain, Freeze, Cut, Thaw, LendMemory), "worker"),
    **dict.fromkeys((RoundReady, RoundClose, PushesStaged, PushesCommitted, LastPushes), "ps"),
    Status: "",
    Trace: "",
}
"""The role that may say a message; "" for any."""

_NAMED = frozenset(_OF_A_WORKER)


def refusal(identity: Identity, message: Message) -> str | None:
    """Returns why a peer may not say something to a server; None where it may.

    Args:
        identity: who the peer has proven to be.
        message: what it says.
    """
    kind = type(message)
    role = _SPEAKERS.get(kind)
    if role is None:
        return f"a server is not asked {kind.__name__}"
    if role and role != identity.role:
        return f"{identity.task} may not say {kind.__name__}: only a task of role {role} may"
    if kind not in _NAMED:
        return None
    said: Any = (
        message  # one of `_OF_A_WORKER`: to ask for its type again takes as long as all this
    )
    if said.worker != identity.index or said.incarnation != identity.incarnation:
        return (
            f"{identity.task}, incarnation {identity.incarnation}, said {kind.__name__} as "
            f"worker:{said.worker}, incarnation {said.incarnation}"
        )
    return None

"""Every error that Trireme raises deliberately, and suggestions for misspelt words in them.

Each message says what happened, to which task, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TriremeError(Exception):
    """The base class of all errors that Trireme raises deliberately."""


class UsageError(TriremeError):
    """The request is impossible. Commands exit with status 2."""


class ConfigurationError(UsageError):
    """Options that contradict each other, a value out of range, or an unknown name."""


class ModelMismatchError(UsageError):
    """Two workers of one job hold different models; names the first difference."""


class UnsupportedOptimizerError(UsageError):
    """The server's registry has no optimizer of this name."""


class WireError(TriremeError):
    """Communication between two processes failed."""

    server = ""  # the name of the parameter server that was unreachable for too long
    loss = ""  # as in `JobFailed`, if that server was lost


class ConnectionClosed(WireError):
    """This side had already closed the connection."""


class PeerClosed(WireError):
    """The peer closed the connection cleanly, between two frames."""


class ConnectionBroken(WireError):
    """The peer or the network broke off inside a frame, or the peer reset the connection."""


class NetworkLost(ConnectionBroken):
    """The system gave the connection up: nothing was acknowledged, or there is no way to the host.

    The peer may live, at the other side of a network that is cut.
    """


class ConnectTimeout(WireError):
    """No answer came from that address before the deadline."""


class ConnectionRefused(WireError):
    """The address refused the connection: nothing listens there."""


class WireTimeout(WireError):
    """An operation exceeded its deadline.

    After a receive the connection remains usable, and the next receive continues. After a send it
    does not, because a part of a message may have been sent.
    """


class FrameError(WireError):
    """The bytes that arrived are no valid frame: wrong magic, version, kind, length or content."""


class ProtocolMismatch(FrameError):
    """The peer speaks another version of the protocol, or one side speaks TLS and the other not."""


class AuthenticationError(WireError):
    """The peer has another job, secret or certificate, or did not authenticate in time."""


class StaleEpochError(AuthenticationError):
    """The task belongs to an earlier start of the job, which was started again since."""


class AddressInUse(WireError):
    """The address to listen on is taken; the message names the holder where it can."""


class ClusterError(TriremeError):
    """The membership of the job is wrong."""


class TaskClaimedError(ClusterError):
    """Another live process already holds this role and index."""


class WaitTimeout(ClusterError):
    """A wait reached its deadline; the message names the tasks that did not come."""


class JobFailed(ClusterError):
    """The job has ended because a task failed; the message names the one that failed first."""

    loss = ""  # what the job loses with that task, in a sentence; "" if it is not known


class JobStopped(ClusterError):
    """The job was stopped before its end; its workers have saved, so that it can go on."""


class ServerError(TriremeError):
    """A parameter server refused a request."""


class Rejected(ServerError):
    """The server cannot accept the request; the message gives its reason."""


class Fenced(ServerError):
    """The request named an old view or an old incarnation; `view` is that of the server."""

    def __init__(self, message: str, view: int) -> None:
        super().__init__(message)
        self.view = view


class CopiesLost(Fenced):
    """All copies of a part of the parameters were lost: the job begins again from a checkpoint."""


class RolledBack(ServerError):
    """The job went back to a checkpoint; updates after its `step`, a global one, are gone."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class OutOfMemory(TriremeError):
    """The system gives this process no memory for what it has to hold; says what takes it."""


class DataError(TriremeError):
    """A file of examples is missing, damaged or of another format; names the file."""


class CheckpointError(TriremeError):
    """A checkpoint is missing, damaged, or of another model; names it."""


class CheckpointLockLost(CheckpointError):
    """This process no longer holds the lock of the run directory; names the process that does."""


class CorruptedValues(TriremeError):
    """Memory or a message has changed by itself; names the task and the tensor. It ends the job."""

    others_go_on = False  # whether it ends this task alone, as others have its values


class NonFiniteError(TriremeError):
    """The loss or a gradient is NaN or infinite and the policy is to raise."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean X?)` if a known word is similar, else an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


# The errors only: the package exports all of them, and `suggestion` is for its own messages.
__all__ = [
    name
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, TriremeError)
]

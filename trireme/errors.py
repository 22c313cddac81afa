"""Every error that Trireme raises on purpose.

    TriremeError
      UsageError                 the caller asked for something that cannot be (exit status 2)
        ConfigurationError         options that contradict each other, or an unknown name
        ModelMismatchError         two workers hold different models
        UnsupportedOptimizerError  the server's registry has no such optimizer
      WireError                  bytes between two processes
        ConnectionClosed           closed by me: the operation came after my own close()
        PeerClosed                 closed by the peer, between two frames
        ConnectionBroken           the peer or the network broke off inside a frame
        ConnectTimeout             nobody answered at that address in time
        ConnectionRefused          something answered, and said no
        WireTimeout                an operation outlasted its deadline
        FrameError                 what arrived is not a frame of ours
        AuthenticationError        wrong job, wrong secret, or no proof of it
          StaleEpochError            a task of an earlier start of the job
        AddressInUse               the port to listen on is taken; names its holder
      ClusterError               who is there
        TaskClaimedError           another live process holds this task
        WaitTimeout                somebody did not come in time; names them
        JobFailed                  the job ended because a task failed; names it
      ServerError                the parameter server answered, and the answer is no
        Rejected                   the request makes no sense to the server
        Fenced                     an old view or an old incarnation
        RolledBack                 the job went back to a checkpoint
      DataError                  a file of examples is missing, damaged or of another format
      CheckpointError            a checkpoint is missing, damaged or of another model
        CheckpointLockLost         the run directory is another process's to write by now
      NonFiniteError             loss or gradient is NaN or infinite

Each message says what happened, to which task, why, and what to do.
"""

from __future__ import annotations

__all__ = [
    "AddressInUse",
    "AuthenticationError",
    "CheckpointError",
    "CheckpointLockLost",
    "ClusterError",
    "ConfigurationError",
    "ConnectTimeout",
    "ConnectionBroken",
    "ConnectionClosed",
    "ConnectionRefused",
    "DataError",
    "Fenced",
    "FrameError",
    "JobFailed",
    "ModelMismatchError",
    "NonFiniteError",
    "PeerClosed",
    "Rejected",
    "RolledBack",
    "ServerError",
    "StaleEpochError",
    "TaskClaimedError",
    "TriremeError",
    "UnsupportedOptimizerError",
    "UsageError",
    "WaitTimeout",
    "WireError",
    "WireTimeout",
]


class TriremeError(Exception):
    """The root: catch this to catch everything Trireme raises on purpose."""


class UsageError(TriremeError):
    """The caller asked for something that cannot be. Command lines end with status 2."""


class ConfigurationError(UsageError):
    """Options that contradict each other, a value out of range, or an unknown name."""


class ModelMismatchError(UsageError):
    """Two workers of one job hold different models; names the first difference."""


class UnsupportedOptimizerError(UsageError):
    """The server's registry has no optimizer of this name."""


class WireError(TriremeError):
    """Something went wrong between two processes.

    Attributes:
        server: the name of the parameter server that was out of reach too long; "" for anything
            else.
        loss: as of `JobFailed`, where that server was lost.
    """

    server = ""
    loss = ""


class ConnectionClosed(WireError):
    """This side had already closed the connection."""


class PeerClosed(WireError):
    """The peer closed the connection cleanly, between two frames."""


class ConnectionBroken(WireError):
    """The peer or the network broke off inside a frame, or the peer reset the connection."""


class ConnectTimeout(WireError):
    """Nobody answered at that address before the deadline."""


class ConnectionRefused(WireError):
    """The address answered and said no: nothing listens there."""


class WireTimeout(WireError):
    """An operation outlasted its deadline.

    After a receive the connection is still good, and the next receive goes on with what has come;
    after a send it is not: part of a message may be on its way.
    """


class FrameError(WireError):
    """What arrived is not a frame of ours: wrong magic, version, kind, length or content."""


class AuthenticationError(WireError):
    """The peer has another secret or serves another job, or gave no proof in time."""


class StaleEpochError(AuthenticationError):
    """The task belongs to an earlier start of the job; all of the job was started anew since."""


class AddressInUse(WireError):
    """The address to listen on is taken; the message names the holder where it can."""


class ClusterError(TriremeError):
    """Something is wrong with who takes part in the job."""


class TaskClaimedError(ClusterError):
    """Another live process already holds this role and index."""


class WaitTimeout(ClusterError):
    """A wait reached its deadline; the message names those who did not come."""


class JobFailed(ClusterError):
    """The job has ended because a task failed; the message names the one that failed first.

    Attributes:
        loss: what is lost with that task, in a sentence; "" where nothing is, or another task says.
    """

    loss = ""


class ServerError(TriremeError):
    """A parameter server answered, and the answer is no."""


class Rejected(ServerError):
    """The request makes no sense to the server; the message gives its reason."""


class Fenced(ServerError):
    """The request carried an old view or an old incarnation.

    Attributes:
        view: the number of the server's own view.
    """

    def __init__(self, message: str, view: int) -> None:
        super().__init__(message)
        self.view = view


class RolledBack(ServerError):
    """The job went back to a checkpoint; updates after its step are gone.

    Attributes:
        step: the global step that the job went back to.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class DataError(TriremeError):
    """A file of examples is missing, damaged or of another format; names the file."""


class CheckpointError(TriremeError):
    """A checkpoint is missing, damaged, or of another model; names it."""


class CheckpointLockLost(CheckpointError):
    """This process no longer holds the lock of the run directory; names who does."""


class NonFiniteError(TriremeError):
    """The loss or a gradient is NaN or infinite and the policy is to raise."""

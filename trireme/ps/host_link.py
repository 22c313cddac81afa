"""A worker's connection to the aggregator of its host, for as long as that answers.

Nothing depends on it: where there is no aggregator, or it breaks, is silent or says so, the worker
pushes to the server itself, with the same sequence number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from trireme.errors import (
    ConfigurationError,
    FrameError,
    ModelMismatchError,
    WireError,
    WireTimeout,
)
from trireme.ps.dense import PartBuffer
from trireme.ps.loan import Loan
from trireme.ps.messages import (
    PS_CATALOG,
    Applied,
    Enlist,
    Enlisted,
    Push,
    PushReply,
    Refused,
    Stale,
    Waiting,
)
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Message
from trireme.wire.shm import ShmStream
from trireme.wire.transport import connect

__all__ = ["HostLink", "aggregator_address"]

_log = logging.getLogger(__name__)

ENLIST_SECONDS = 10.0
"""So long a worker waits at its start for the aggregator of its host to listen."""

_SLICE = 0.05  # seconds between two tries at the start
_PAUSE = 1.0  # seconds until an aggregator that was lost is tried again
_LONGEST_PAUSE = 60.0


def aggregator_address(coordinator: str) -> str:
    """Returns where the aggregator of this host listens, for the job of a coordinator.

    Args:
        coordinator: the coordinator's address, as every task of the job has it.
    """
    return f"shm://trireme-aggregator-{coordinator.partition('://')[2]}"


class HostLink:
    """One worker's connection to the aggregator of its host. Used by one thread.

    The aggregator reads gradients from lent memory, where there is some. Values it sends: it must
    never write to a worker that may have gone on without it.

    Args:
        address: where the aggregator listens.
        identity: the worker's.
        secret: the job's.
        gradients: what a push sends.
        values: where its answer's values are received.
        loan: the gradients' memory; None where it cannot be lent.
        silence: so many seconds without a word from it, and it is taken for lost.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        secret: bytes,
        gradients: PartBuffer,
        values: PartBuffer,
        *,
        loan: Loan | None,
        silence: float,
    ) -> None:
        self.address = address
        self._identity = identity
        self._secret = secret
        self._gradients = gradients
        self._values = values
        self._loan = loan
        self._silence = silence
        self._enlist: Enlist | None = None
        self._connection: Connection | None = None
        self._sequence = 0
        self._said = False
        self._again = 0.0  # when the aggregator is tried again
        self._pause = _PAUSE

    def enlist(self, message: Enlist, *, patience: float = ENLIST_SECONDS) -> None:
        """Says what this worker trains, now and whenever the connection is made again.

        Args:
            message: what it is.
            patience: seconds that the aggregator, which is started with its workers, may take to
                listen.

        Raises:
            ConfigurationError: the aggregator cannot sum that.
            ModelMismatchError: another worker of this host trains something else.
        """
        self._enlist = message
        deadline = time.monotonic() + patience
        while not self._ready(last=time.monotonic() >= deadline):
            if time.monotonic() >= deadline:
                break
            time.sleep(_SLICE)

    def push(self, message: Push) -> bool:
        """Pushes the gradients; returns whether `wait` may have an answer."""
        if self._connection is None and time.monotonic() < self._again:
            return False
        if not self._ready(last=True):
            return False
        assert self._connection is not None
        self._sequence += 1
        try:
            self._connection.send(
                message, self._gradients.views, sequence=self._sequence, timeout=self._silence
            )
        except WireError as error:
            self._lost(str(error))
            return False
        return True

    def wait(
        self, slice_seconds: float, meanwhile: Callable[[Waiting | None], None]
    ) -> PushReply | None:
        """Waits for the answer to a push.

        Args:
            slice_seconds: how often to call `meanwhile`, at least.
            meanwhile: told the notices that come, and None when there is nothing new; may raise.

        Returns:
            None when this worker shall push by itself.
        """
        heard = time.monotonic()
        while self._connection is not None:
            try:
                incoming = self._connection.receive(timeout=slice_seconds)
            except WireTimeout:
                if time.monotonic() - heard > self._silence:
                    self._lost(f"it was silent for {self._silence:.0f} s")
                else:
                    meanwhile(None)
                continue
            except WireError as error:
                self._lost(str(error))
                continue
            heard = time.monotonic()
            message = incoming.message
            if incoming.sequence != self._sequence:
                continue
            if isinstance(message, Waiting):
                meanwhile(message)
            elif isinstance(message, PushReply) and isinstance(message.verdict, Applied | Stale):
                self._pause, self._said = _PAUSE, False
                return message
            else:
                return None
        return None

    def close(self) -> None:
        """Closes the connection; the others of the host wait for this worker no more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def leave(self) -> None:
        """Closes the connection for good."""
        self._enlist = None
        self.close()

    # -- inside ---------------------------------------------------------------------------------

    def _ready(self, *, last: bool) -> bool:
        """Connects where there is no connection; returns whether there is one.

        Args:
            last: whether it is given up for a while, and said so, if it cannot be made now.
        """
        if self._connection is None and self._enlist is not None:
            try:
                self._connection = self._connect(self._enlist)
            except WireError as error:
                if last:
                    self._lost(str(error))
        return self._connection is not None

    def _connect(self, enlist: Enlist) -> Connection:
        stream = connect(self.address, timeout=1.0)
        connection = Connection(stream, PS_CATALOG, destination=self._place)
        connection.peer = f"the aggregator of this host at {self.address}"
        try:
            authenticate(connection, self._identity, self._secret, server="aggregator:0")
            connection.send(enlist, timeout=self._silence)
            answer = connection.receive(timeout=self._silence).message
            if not isinstance(answer, Enlisted):
                _raise_refusal(answer)
            if isinstance(stream, ShmStream) and self._loan is not None:
                self._loan.offer(connection, stream, timeout=self._silence)
        except BaseException:
            connection.close()
            raise
        return connection

    def _place(self, message: Message, length: int) -> Sequence[memoryview]:
        if isinstance(message, PushReply) and length == self._values.nbytes:
            return self._values.views
        raise FrameError(f"{type(message).__name__} has no payload of {length} bytes")

    def _lost(self, reason: str) -> None:
        """Goes on without the aggregator for a while, longer each time; says so once."""
        self.close()
        self._again = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if not self._said:
            self._said = True
            _log.warning(
                "%s pushes to the server by itself: %s: %s",
                self._identity.task,
                self.address,
                reason,
            )


def _raise_refusal(answer: Message) -> None:
    if isinstance(answer, Refused) and answer.code == "mismatch":
        raise ModelMismatchError(answer.reason)
    if isinstance(answer, Refused):
        raise ConfigurationError(answer.reason)
    raise FrameError(f"an aggregator answered Enlist with {type(answer).__name__}")

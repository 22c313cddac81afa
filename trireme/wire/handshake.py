"""How two tasks of a job prove to each other that they know its secret.

    client                                            server
      Hello(job, epoch, task, ...)          ->
                                            <-  Challenge(nonce)
      Proof(HMAC of both, as the client)    ->
                                            <-  Welcome(HMAC of all three, as the server)

or `Denied(reason)` in the place of an answer. The HMACs are SHA-256 under the job's secret, over
everything said so far, each side with a label of its own, so that neither can be replayed later or
reflected. The client proves first: a stranger learns only whether the job's name was right.
What follows is neither encrypted nor signed: that is for TLS.

The *epoch* says which start of the job a task belongs to: a job that is started again has another,
though its id, its secret and its addresses may be the same. A task learns it when it joins. Whoever
names an epoch must name the server's; it is checked once the client has proven itself.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from trireme.errors import (
    AuthenticationError,
    ConnectionRefused,
    FrameError,
    StaleEpochError,
    WireError,
    WireTimeout,
)
from trireme.wire.connection import Connection
from trireme.wire.message import HANDSHAKE_LIMITS, Catalog, Message

__all__ = [
    "HANDSHAKE_CATALOG",
    "HANDSHAKE_TIMEOUT",
    "Challenge",
    "Denied",
    "Hello",
    "Identity",
    "Proof",
    "ServerHandshake",
    "Welcome",
    "authenticate",
    "new_epoch",
]

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a handshake may take, unless the caller says otherwise."""

_NONCE_BYTES = 32
_CLIENT = b"trireme handshake 2 client"
_SERVER = b"trireme handshake 2 server"


class Hello(Message, frozen=True, array_like=True):
    """The client's first words: which job and task it is, and 32 random bytes.

    Attributes:
        job: the job's id.
        epoch: which start of the job; "" where the client has not joined.
        task: the role and index, such as `worker:1`.
        incarnation: which start of this task; 0 while none was given.
        nonce: 32 random bytes.
    """

    kind: ClassVar[int] = 1
    job: str
    epoch: str
    task: str
    incarnation: int
    nonce: bytes


class Challenge(Message, frozen=True, array_like=True):
    """The server's 32 random bytes."""

    kind: ClassVar[int] = 2
    nonce: bytes


class Proof(Message, frozen=True, array_like=True):
    """The client's HMAC over `Hello` and `Challenge`."""

    kind: ClassVar[int] = 3
    hmac: bytes


class Welcome(Message, frozen=True, array_like=True):
    """The server's HMAC over `Hello`, `Challenge` and `Proof`: the connection may be used."""

    kind: ClassVar[int] = 4
    hmac: bytes


class Denied(Message, frozen=True, array_like=True):
    """The server does not go on. `reason` is one of `job`, `secret`, `epoch`, `early`, `order`.

    `early`: the server itself has not joined, and cannot tell yet if the epoch is right.
    """

    kind: ClassVar[int] = 5
    reason: str


HANDSHAKE_CATALOG = Catalog((Hello, Challenge, Proof, Welcome, Denied))

_Answer = TypeVar("_Answer", bound=Message)
_ENCODED = Catalog((Hello, Challenge, Proof))  # one canonical form of each, for the transcript


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is at one end of a connection.

    Attributes:
        job: the job's id.
        task: the role and index, such as `worker:1`.
        incarnation: which start of this task; 0 while none was given.
        epoch: which start of the job; "" before the task has joined.
    """

    job: str
    task: str
    incarnation: int = 0
    epoch: str = ""


def new_epoch() -> str:
    """Returns a name for a start of a job: random, so that no two are the same."""
    return secrets.token_hex(8)


class ServerHandshake:
    """The server's side of one handshake, as a state machine without I/O or time.

    Args:
        job: the job's id.
        secret: the job's.
        epoch: the server's own; "" where it has not joined yet, None to take clients of any.

    Attributes:
        identity: who the client has proven to be; None before that.
        denied: why the handshake failed; None while it has not.
    """

    def __init__(self, job: str, secret: bytes, epoch: str | None = "") -> None:
        self.identity: Identity | None = None
        self.denied: str | None = None
        self._job = job
        self._secret = secret
        self._epoch = epoch
        self._hello: Hello | None = None
        self._challenge = Challenge(secrets.token_bytes(_NONCE_BYTES))

    def answer(self, message: Message) -> Message:
        """Takes the client's next message and returns what to send back.

        After `Denied` the connection is to be closed; after `Welcome`, `identity` is set.
        """
        over = self.identity is not None or self.denied is not None
        if isinstance(message, Hello) and self._hello is None and not over:
            return self._answer_hello(message)
        if isinstance(message, Proof) and self._hello is not None and not over:
            return self._answer_proof(self._hello, message)
        return self._deny("order", f"{type(message).__name__} came out of order")

    def _answer_hello(self, hello: Hello) -> Message:
        if hello.job != self._job:
            return self._deny("job", f"{hello.task} is of another job, {hello.job}")
        if len(hello.nonce) != _NONCE_BYTES:
            return self._deny("order", f"{hello.task} sent a nonce of {len(hello.nonce)} bytes")
        self._hello = hello
        return self._challenge

    def _answer_proof(self, hello: Hello, proof: Proof) -> Message:
        expected = _client_proof(self._secret, hello, self._challenge)
        if not hmac.compare_digest(expected, proof.hmac):
            return self._deny("secret", f"{hello.task} does not know this job's secret")
        if hello.epoch and self._epoch is not None and hello.epoch != self._epoch:
            if not self._epoch:
                return self._deny("early", f"{hello.task} came before this task had joined")
            return self._deny("epoch", f"{hello.task} belongs to an earlier start of the job")
        self.identity = Identity(hello.job, hello.task, hello.incarnation, hello.epoch)
        return Welcome(_server_proof(self._secret, hello, self._challenge, proof))

    def _deny(self, reason: str, explanation: str) -> Denied:
        self.identity = None
        self.denied = explanation
        return Denied(reason)


def authenticate(
    connection: Connection,
    identity: Identity,
    secret: bytes,
    *,
    timeout: float = HANDSHAKE_TIMEOUT,
) -> None:
    """Proves to the server at the other end who this is, and has it prove the same; blocks.

    Afterwards the connection's own catalog and limits are in force again.

    Args:
        connection: fresh, nothing sent or received.
        identity: this task's.
        secret: the job's.
        timeout: in seconds, for all of it.

    Raises:
        AuthenticationError: the server serves another job or has another secret. The connection
            is closed. Trying again is of no use.
        StaleEpochError: this task belongs to an earlier start of the job. The connection is
            closed.
        ConnectionRefused: the server has not joined the job yet. The connection is closed; try
            again soon.
        WireTimeout: the server did not answer in time. The connection is closed.
        PeerClosed, ConnectionBroken: the connection was lost on the way.
        FrameError: the other end does not speak this protocol.
    """
    catalog, limits = connection.catalog, connection.limits
    connection.catalog, connection.limits = HANDSHAKE_CATALOG, HANDSHAKE_LIMITS
    try:
        _authenticate(connection, identity, secret, timeout)
    except WireError:
        connection.close()
        raise
    connection.catalog, connection.limits = catalog, limits


def _authenticate(
    connection: Connection, identity: Identity, secret: bytes, timeout: float
) -> None:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = Hello(identity.job, identity.epoch, identity.task, identity.incarnation, nonce)
    deadline = connection.clock.now() + timeout
    challenge = _ask(connection, hello, Challenge, identity, deadline)
    proof = Proof(_client_proof(secret, hello, challenge))
    welcome = _ask(connection, proof, Welcome, identity, deadline)
    expected = _server_proof(secret, hello, challenge, proof)
    if not hmac.compare_digest(expected, welcome.hmac):
        raise AuthenticationError(
            f"{connection.peer} could not prove that it knows the secret of job {identity.job}: "
            "something else listens at this address; check the address"
        )


def _ask(
    connection: Connection,
    question: Message,
    wanted: type[_Answer],
    identity: Identity,
    deadline: float,
) -> _Answer:
    try:
        connection.send(question, timeout=deadline - connection.clock.now())
        answer = connection.receive(timeout=deadline - connection.clock.now()).message
    except WireTimeout as error:
        raise WireTimeout(
            f"{connection.peer} did not answer the handshake of {identity.task} in time: the "
            "process there hangs, or is not Trireme's"
        ) from error
    if isinstance(answer, Denied):
        raise _refusal(answer.reason, connection.peer, identity)
    if not isinstance(answer, wanted):
        raise FrameError(
            f"{connection.peer} answered {type(question).__name__} with {type(answer).__name__}"
        )
    return answer


def _refusal(reason: str, peer: str, identity: Identity) -> WireError:
    if reason == "early":
        return ConnectionRefused(f"{peer} has not joined job {identity.job} yet")
    if reason == "epoch":
        return StaleEpochError(
            f"{identity.task} belongs to an earlier start of job {identity.job}: the job at "
            f"{peer} was started again since. End this process; the new start takes none of its "
            "updates"
        )
    return AuthenticationError(_explain(reason, peer, identity))


def _explain(reason: str, peer: str, identity: Identity) -> str:
    if reason == "job":
        return (
            f"{peer} serves another job than {identity.job}: check the address, and whether tasks "
            "of an older run are still there"
        )
    if reason == "secret":
        return (
            f"{peer} denied {identity.task}: this task's secret is not that of job "
            f"{identity.job}; start every task of a job with the same secret"
        )
    return f"{peer} denied {identity.task}: it took the handshake for malformed ({reason!r})"


def _client_proof(secret: bytes, hello: Hello, challenge: Challenge) -> bytes:
    return _digest(secret, _CLIENT, hello, challenge)


def _server_proof(secret: bytes, hello: Hello, challenge: Challenge, proof: Proof) -> bytes:
    return _digest(secret, _SERVER, hello, challenge, proof)


def _digest(secret: bytes, label: bytes, *said: Message) -> bytes:
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (label, *map(_ENCODED.encode, said)):
        # The length first: no two transcripts run together into the same bytes.
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()

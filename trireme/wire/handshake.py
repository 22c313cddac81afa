"""How two tasks of a job prove to each other that they know its secret.

    client                                            server
      Hello(who, to whom, nonce)            ->
                                            <-  Challenge(nonce)
      Proof(HMAC of both, as the client)    ->
                                            <-  Welcome(HMAC of all three, as the server)

or `Denied(reason)` in the place of an answer. The HMACs are SHA-256 under the job's secret, over
everything said so far, each side with a label of its own, so that neither can be replayed later or
reflected. The client proves first: a stranger learns only whether the job's name was right.
What follows is neither encrypted nor signed: that is for TLS.

The transcript holds to whom the client means to speak: the server's task, and the address that it
called, with its transport. A server that finds itself elsewhere denies it. So whoever has taken an
address before the server could, and passes what it is told on to the server, is found out: the
client gets no `Welcome`.

The *epoch* says which start of the job a task belongs to: a job that is started again has another,
though its id, its secret and its addresses may be the same. A task learns it when it joins. Whoever
names an epoch must name the server's; it is checked once the client has proven itself.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
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
from trireme.wire.message import HANDSHAKE_LIMITS, Catalog, Message, Number

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
_TASK = re.compile(r"[a-z]{1,32}:(0|[1-9][0-9]{0,4})", re.ASCII)
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
        server: the task that it means to speak to, such as `ps:0`.
        address: where it called that task, with the transport, as the system says.
    """

    kind: ClassVar[int] = 1
    job: str
    epoch: str
    task: str
    incarnation: Number
    nonce: bytes
    server: str = ""
    address: str = ""


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
    """The server does not go on.

    `reason` is one of `order`, `job`, `secret`, `server` (it is another task), `address` (the
    client called another address than the one at which this server was called), `epoch`, and
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
        calls: the task that it means to speak to over this connection: one process may be two,
            such as `ps:0` and `coordinator:0`. Two identities are the same whatever they call.
        role: the task's, such as `worker`.
        index: the task's, such as 1; -1 where its name is none, which no handshake lets through.
    """

    job: str
    task: str
    incarnation: int = 0
    epoch: str = ""
    calls: str = field(default="", repr=False, compare=False)
    role: str = field(init=False, repr=False, compare=False)
    index: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        role, _, digits = self.task.partition(":")
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "index", int(digits) if _TASK.fullmatch(self.task) else -1)


def new_epoch() -> str:
    """Returns a name for a start of a job: random, so that no two are the same."""
    return secrets.token_hex(8)


class ServerHandshake:
    """The server's side of one handshake, as a state machine without I/O or time.

    Args:
        job: the job's id.
        secret: the job's.
        epoch: the server's own; "" where it has not joined yet, None to take clients of any.
        serves: the tasks that it is, such as `ps:0`; empty to take clients that mean any.
        called: where it was called: see `trireme.wire.transport.Stream`.

    Attributes:
        identity: who the client has proven to be; None before that.
        denied: why the handshake failed; None while it has not.
        early: whether that is because this task has not joined its job yet: a task of the same job
            tries again.
    """

    def __init__(
        self,
        job: str,
        secret: bytes,
        epoch: str | None = "",
        *,
        serves: Collection[str] = (),
        called: str = "",
    ) -> None:
        self.identity: Identity | None = None
        self.denied: str | None = None
        self.early = False
        self._job = job
        self._secret = secret
        self._epoch = epoch
        self._serves = serves
        self._called = called
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
        if _TASK.fullmatch(hello.task) is None:
            return self._deny("order", f"{hello.task!r} is not the name of a task")
        self._hello = hello
        return self._challenge

    def _answer_proof(self, hello: Hello, proof: Proof) -> Message:
        expected = _client_proof(self._secret, hello, self._challenge)
        if not hmac.compare_digest(expected, proof.hmac):
            return self._deny("secret", f"{hello.task} does not know this job's secret")
        if self._serves and hello.server not in self._serves:
            here = " and ".join(self._serves)
            return self._deny("server", f"{hello.task} meant to reach {hello.server}, not {here}")
        if not _same_place(hello.address, self._called):
            how = f"called {hello.address}, and its connection came to {self._called}"
            return self._deny("address", f"{hello.task} {how}: something between passes it on")
        if hello.epoch and self._epoch is not None and hello.epoch != self._epoch:
            if not self._epoch:
                self.early = True
                return self._deny("early", f"{hello.task} came before this task had joined the job")
            return self._deny("epoch", f"{hello.task} belongs to an earlier start of the job")
        self.identity = Identity(
            hello.job, hello.task, hello.incarnation, hello.epoch, hello.server
        )
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
    server: str,
    timeout: float = HANDSHAKE_TIMEOUT,
) -> None:
    """Proves to the server at the other end who this is, and has it prove the same; blocks.

    Afterwards the connection's own catalog and limits are in force again.

    Args:
        connection: fresh, nothing sent or received.
        identity: this task's.
        secret: the job's.
        server: the task that is to be at the other end, such as `ps:0`.
        timeout: in seconds, for all of it.

    Raises:
        AuthenticationError: the server serves another job, has another secret or is another task,
            or something else listens in its place. The connection is closed. Trying again is of no
            use.
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
        _authenticate(connection, identity, secret, server, timeout)
    except WireError:
        connection.close()
        raise
    connection.catalog, connection.limits = catalog, limits


def _authenticate(
    connection: Connection, identity: Identity, secret: bytes, server: str, timeout: float
) -> None:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = Hello(
        job=identity.job,
        epoch=identity.epoch,
        task=identity.task,
        incarnation=identity.incarnation,
        nonce=nonce,
        server=server,
        address=connection.stream.called,
    )
    deadline = connection.clock.now() + timeout
    challenge = _ask(connection, hello, Challenge, hello, deadline)
    proof = Proof(_client_proof(secret, hello, challenge))
    welcome = _ask(connection, proof, Welcome, hello, deadline)
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
    hello: Hello,
    deadline: float,
) -> _Answer:
    try:
        connection.send(question, timeout=deadline - connection.clock.now())
        answer = connection.receive(timeout=deadline - connection.clock.now()).message
    except WireTimeout as error:
        raise WireTimeout(
            f"{connection.peer} did not answer the handshake of {hello.task} in time: the "
            "process there hangs, or is not Trireme's"
        ) from error
    if isinstance(answer, Denied):
        raise _refusal(answer.reason, connection.peer, hello)
    if not isinstance(answer, wanted):
        raise FrameError(
            f"{connection.peer} answered {type(question).__name__} with {type(answer).__name__}"
        )
    return answer


def _refusal(reason: str, peer: str, hello: Hello) -> WireError:
    if reason == "early":
        return ConnectionRefused(f"{peer} has not joined job {hello.job} yet")
    if reason == "epoch":
        return StaleEpochError(
            f"{hello.task} belongs to an earlier start of job {hello.job}: the job at "
            f"{peer} was started again since. End this process; the new start takes none of its "
            "updates"
        )
    return AuthenticationError(_explain(reason, peer, hello))


def _explain(reason: str, peer: str, hello: Hello) -> str:
    if reason == "job":
        return (
            f"{peer} serves another job than {hello.job}: check the address, and whether tasks "
            "of an older run are still there"
        )
    if reason == "secret":
        return (
            f"{peer} denied {hello.task}: this task's secret is not that of job "
            f"{hello.job}; start every task of a job with the same secret"
        )
    if reason == "server":
        return (
            f"{peer} is not {hello.server}, which {hello.task} meant to reach: check the "
            "addresses, which must be in the same order for every task"
        )
    if reason == "address":
        return (
            f"{hello.task} called {hello.address} for {hello.server}, which is not called there: "
            "something between them passes on what they say, such as another process that has "
            "taken the address, or a proxy or a tunnel. Connect to the task directly"
        )
    return f"{peer} denied {hello.task}: it took the handshake for malformed ({reason!r})"


def _same_place(theirs: str, ours: str) -> bool:
    """Returns whether both sides mean the same address.

    On one host they must: names of sockets, and addresses that only this host can reach. Between
    hosts the network may translate addresses; there only the transport must be the same.
    """
    if theirs == ours:
        return True
    (scheme, _, there), (wanted, _, here) = theirs.partition("://"), ours.partition("://")
    if not scheme == wanted == "tcp":
        return False
    return not (_is_loopback(there) or _is_loopback(here))


def _is_loopback(place: str) -> bool:
    host = place.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True  # nothing that a socket of ours says: not to be trusted


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

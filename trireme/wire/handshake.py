"""The handshake, in which two tasks of a job prove to each other that they know its secret.

docs/protocol.md has its course. The client proves first: a stranger learns only whether the job's
name was right. What is signed holds the server's task and the address that the client called, so
that a process that relays the handshake is detected. The messages that follow are neither encrypted
nor signed: that is for TLS.

The *epoch* identifies one start of the job, whose id, secret and addresses the next may have too.
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
from trireme.wire.transport import TRANSPORTS

HANDSHAKE_TIMEOUT = 10.0  # seconds that a handshake may take, unless the caller says otherwise

_NONCE_BYTES = 32
_SHOWN = 64  # how many characters of a stranger's words a message quotes
_TASK = re.compile(r"[a-z]{1,32}:(0|[1-9][0-9]{0,4})", re.ASCII)
# Each side signs with a label of its own: an HMAC can be neither replayed nor reflected.
_CLIENT = b"trireme handshake 2 client"
_SERVER = b"trireme handshake 2 server"


class Hello(Message, frozen=True, array_like=True):
    """The client's first message: its identity, the task that it addresses, and 32 random bytes."""

    kind: ClassVar[int] = 1
    job: str
    epoch: str  # "" if the client has not joined
    task: str
    incarnation: Number  # 0 while the client has none
    nonce: bytes
    server: str = ""
    address: str = ""  # that the client called, as its system reports it


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
    """The server denies the client, and closes the connection; `_refusal` has the reasons."""

    kind: ClassVar[int] = 5
    reason: str


HANDSHAKE_CATALOG = Catalog((Hello, Challenge, Proof, Welcome, Denied))

_Reply = TypeVar("_Reply", bound=Message)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one end of a connection."""

    job: str
    task: str
    incarnation: int = 0  # 0 while it has none
    epoch: str = ""  # "" before the task has joined
    # The task that it addresses: one process may be two, such as `ps:0` and `coordinator:0`.
    calls: str = field(default="", repr=False, compare=False)
    role: str = field(init=False, repr=False, compare=False)
    index: int = field(init=False, repr=False, compare=False)  # -1 if the name is malformed

    def __post_init__(self) -> None:
        role, _, digits = self.task.partition(":")
        object.__setattr__(self, "role", role)
        object.__setattr__(self, "index", int(digits) if _TASK.fullmatch(self.task) else -1)


def new_epoch() -> str:
    """Returns a new random epoch."""
    return secrets.token_hex(8)


class ServerHandshake:
    """The server's side of one handshake, as a state machine without I/O or time.

    It denies clients that address a task other than those that it `serves`, if it names any.
    """

    def __init__(
        self,
        job: str,
        secret: bytes,
        epoch: str = "",
        *,
        serves: Collection[str] = (),
        called: str = "",
    ) -> None:
        self.identity: Identity | None = None  # that the client has proven
        self.denied: str | None = None  # why the handshake failed
        self.early = False  # whether that is as this server has not joined: the client tries again
        self.certified: Collection[str] | None = None  # what the client's certificate names
        self._job, self._secret, self._epoch = job, secret, epoch
        self._serves, self._called = serves, called
        self._hello: Hello | None = None
        self._challenge = Challenge(secrets.token_bytes(_NONCE_BYTES))

    def answer(self, message: Message) -> Message:
        """Returns what to send back. After `Denied` the connection is to be closed."""
        hello, over = self._hello, self.identity is not None or self.denied is not None
        if isinstance(message, Hello) and hello is None and not over:
            return self._answer_hello(message)
        if isinstance(message, Proof) and hello is not None and not over:
            return self._answer_proof(hello, message)
        return self._deny("order", f"{type(message).__name__} came out of order")

    def _answer_hello(self, hello: Hello) -> Message:
        if _TASK.fullmatch(hello.task) is None:
            return self._deny("order", f"{hello.task[:_SHOWN]!r} is not the name of a task")
        if hello.job != self._job:
            return self._deny("job", f"{hello.task} is of another job, {hello.job[:_SHOWN]!r}")
        if len(hello.nonce) != _NONCE_BYTES:
            return self._deny("order", f"{hello.task} sent a nonce of {len(hello.nonce)} bytes")
        self._hello = hello
        return self._challenge

    def _answer_proof(self, hello: Hello, proof: Proof) -> Message:
        expected = _digest(self._secret, _CLIENT, hello, self._challenge)
        if not hmac.compare_digest(expected, proof.hmac):
            return self._deny("secret", f"{hello.task} does not know this job's secret")
        if self.certified is not None and hello.task not in self.certified:
            own = " and ".join(self.certified) or "no task"
            return self._deny("certificate", f"{hello.task} has a certificate for {own}")
        if self._serves and hello.server not in self._serves:
            own = " and ".join(self._serves)
            return self._deny("server", f"{hello.task} meant to reach {hello.server}, not {own}")
        if not _same_address(hello.address, self._called):
            how = f"called {hello.address}, and its connection came to {self._called}"
            return self._deny("address", f"{hello.task} {how}: something between passes it on")
        if hello.epoch and hello.epoch != self._epoch:
            if not self._epoch:
                return self._deny("early", f"{hello.task} came before this task had joined the job")
            return self._deny("epoch", f"{hello.task} belongs to an earlier start of the job")
        self.identity = Identity(
            hello.job, hello.task, hello.incarnation, hello.epoch, hello.server
        )
        return Welcome(_digest(self._secret, _SERVER, hello, self._challenge, proof))

    def _deny(self, reason: str, explanation: str) -> Denied:
        self.identity = None
        self.denied, self.early = explanation, reason == "early"
        return Denied(reason)


def authenticate(
    connection: Connection,
    identity: Identity,
    secret: bytes,
    *,
    server: str,
    timeout: float = HANDSHAKE_TIMEOUT,
) -> None:
    """Authenticates this task to a server, and the server to this task; blocks.

    Raises:
        AuthenticationError: one refuses the other. A retry does not help.
        StaleEpochError: this task belongs to an earlier start of the job.
        ConnectionRefused: the server has not joined the job yet. Retry soon.
    """
    catalog, limits = connection.catalog, connection.limits
    connection.catalog, connection.limits = HANDSHAKE_CATALOG, HANDSHAKE_LIMITS
    hello = Hello(
        *(identity.job, identity.epoch, identity.task, identity.incarnation),
        nonce=secrets.token_bytes(_NONCE_BYTES),
        server=server,
        address=connection.stream.called,
    )
    deadline = connection.clock.now() + timeout
    try:
        certified = connection.stream.certified
        if certified is not None and server not in certified:
            own = " and ".join(certified) or "no task"
            raise AuthenticationError(
                f"{connection.peer} has a certificate for {own}, and {server} was to be there: "
                "check the addresses, and that each task has the certificate of its own name"
            )
        challenge = _ask(connection, hello, Challenge, hello, deadline)
        proof = Proof(_digest(secret, _CLIENT, hello, challenge))
        welcome = _ask(connection, proof, Welcome, hello, deadline)
        expected = _digest(secret, _SERVER, hello, challenge, proof)
        if not hmac.compare_digest(expected, welcome.hmac):
            raise AuthenticationError(
                f"{connection.peer} could not prove that it knows the secret of job {hello.job}: "
                "another process listens at this address; check the address"
            )
    except WireError:
        connection.close()
        raise
    connection.catalog, connection.limits = catalog, limits


def _ask(
    connection: Connection, question: Message, expected: type[_Reply], hello: Hello, deadline: float
) -> _Reply:
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
    if not isinstance(answer, expected):
        raise FrameError(
            f"{connection.peer} answered {type(question).__name__} with {type(answer).__name__}"
        )
    return answer


def _refusal(reason: str, peer: str, hello: Hello) -> WireError:
    kinds = {"early": ConnectionRefused, "epoch": StaleEpochError}
    texts = {
        "early": f"{peer} has not joined job {hello.job} yet",
        "epoch": f"{hello.task} belongs to an earlier start of job {hello.job}: the job at {peer} "
        "was started again since. End this process; the new start takes none of its updates",
        "job": f"{peer} serves another job than {hello.job}: check the address, and whether tasks "
        "of an older run are still there",
        "secret": f"{peer} denied {hello.task}: this task's secret is not that of job "
        f"{hello.job}; start every task of a job with the same secret",
        "certificate": f"{peer} denied {hello.task}: the certificate of this task is for another; "
        f"give it its own (`trireme certs issue DIR --task {hello.task}`)",
        "version": f"{peer} speaks another version of the protocol than {hello.task}: "
        "install the same release of trireme for every task",
        "server": f"{peer} is not {hello.server}, which {hello.task} meant to reach: check the "
        "addresses, which must be in the same order for every task",
        "address": f"{hello.task} called {hello.address} for {hello.server}, which does not listen "
        "there: something between them relays the connection, such as another process that has "
        "taken the address, or a proxy or a tunnel. Connect to the task directly",
    }
    other = f"{peer} denied {hello.task}: it took the handshake for malformed ({reason!r})"
    return kinds.get(reason, AuthenticationError)(texts.get(reason, other))


def _same_address(theirs: str, ours: str) -> bool:
    """Returns whether both sides report one address; between hosts, whether one transport."""
    if theirs == ours:
        return True
    (scheme, _, other), (expected, _, own) = theirs.partition("://"), ours.partition("://")
    if scheme != expected or not TRANSPORTS.load(expected).between_hosts:
        return False
    return not (_is_loopback(other) or _is_loopback(own))


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True  # not an address that a socket reports: not to be trusted


def _digest(secret: bytes, label: bytes, *messages: Message) -> bytes:
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (label, *map(HANDSHAKE_CATALOG.encode, messages)):
        # The length first, so that no two transcripts give the same bytes.
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()

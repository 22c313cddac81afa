"""Damaged handshakes, from both sides.

One side is honest and real: `ServerHandshake`, or `authenticate`. The other one is honest too,
and somebody between them damages, drops, repeats, replaces or reorders what it sends; or it
does not know the secret; or it knows the secret and lies. Nobody is let in but who has proven,
for this very conversation, what it says of itself.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.fuzz.damage import damaged_bytes, damaged_value
from tests.fuzz.frames import Pieces, framed
from tests.fuzz.values import message_of
from trireme.errors import PeerClosed, WireError
from trireme.wire.connection import Connection
from trireme.wire.handshake import (
    HANDSHAKE_CATALOG,
    Challenge,
    Denied,
    Hello,
    Identity,
    Proof,
    ServerHandshake,
    Welcome,
    authenticate,
)
from trireme.wire.message import HANDSHAKE_LIMITS, Message
from trireme.wire.transport import Stream

JOB, SECRET, EPOCH = "job-1", b"s" * 32, "0123456789abcdef"
SERVER, ADDRESS = "ps:0", "memory://here"
TASKS = ("worker:0", "worker:1", "ps:0", "coordinator:0", "worker:65535")
KINDS = (Hello, Challenge, Proof, Welcome, Denied)


def run_case(draw: random.Random) -> str:
    """Runs one damaged handshake against a server or a client; returns how it ended."""
    return _against_server(draw) if draw.random() < 0.5 else _against_client(draw)


def mac(secret: bytes, label: bytes, *messages: Message) -> bytes:
    """The HMAC over a transcript, as the protocol's page describes it."""
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (label, *map(msgspec.msgpack.encode, messages)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


# Against a server --------------------------------------------------------------------------------


def _against_server(draw: random.Random) -> str:
    server = ServerHandshake(JOB, SECRET, EPOCH, serves=(SERVER,), called=ADDRESS)
    hello = Hello(JOB, draw.choice(("", EPOCH)), draw.choice(TASKS), 3, draw.randbytes(32))
    hello = msgspec.structs.replace(hello, server=SERVER, address=ADDRESS)
    attacker = draw.choice(("between", "without the secret", "lying"))
    if attacker == "lying":
        hello = _otherwise(hello, draw)
    seen: list[Message] = []
    answers: list[Message] = []
    sends: list[Message] = [hello]
    for turn in range(draw.choice((2, 2, 2, 3))):
        sent = sends[-1]
        data = framed(sent, HANDSHAKE_CATALOG.encode(sent), sequence=0)
        if attacker == "between" and draw.random() < 0.6:
            data = _interfered(sent, data, [*answers, *sends], draw)
        for message in _received(data):
            seen.append(message)
            answers.append(server.answer(message))
            if server.identity is not None:
                _check_admitted(server.identity, seen, answers, hello)
                return f"{attacker}, to a server: admitted"
        if not answers or not isinstance(answers[-1], Challenge):
            break
        secret = draw.randbytes(32) if attacker == "without the secret" else SECRET
        told = seen[-1] if attacker == "lying" and turn == 0 else hello
        proof = mac(secret, b"trireme handshake 2 client", told, answers[-1])
        sends.append(Proof(proof))
    return f"{attacker}, to a server: refused"


def _received(data: bytes) -> list[Message]:
    """Returns what a server reads before the bytes end or are no frame."""
    reader = Connection(Pieces(data, (1 << 16,)), HANDSHAKE_CATALOG, limits=HANDSHAKE_LIMITS)
    found: list[Message] = []
    while True:
        try:
            incoming = reader.poll()
        except WireError:
            return found
        if incoming is not None:
            found.append(incoming.message)


def _check_admitted(
    identity: Identity, seen: Sequence[Message], answers: Sequence[Message], meant: Hello
) -> None:
    hello, proof = seen[-2], seen[-1]
    assert isinstance(hello, Hello) and isinstance(proof, Proof) and len(seen) == 2, seen
    challenge = answers[0]
    assert proof.hmac == mac(SECRET, b"trireme handshake 2 client", hello, challenge)
    assert hello == meant, f"{hello} was admitted, and {meant} was sent"
    assert (hello.job, hello.server, hello.address) == (JOB, SERVER, ADDRESS)
    assert hello.epoch in ("", EPOCH) and len(hello.nonce) == 32
    assert identity == Identity(JOB, hello.task, hello.incarnation, hello.epoch)
    assert identity.index >= 0 and f"{identity.role}:{identity.index}" == hello.task
    welcome = mac(SECRET, b"trireme handshake 2 server", hello, challenge, proof)
    assert answers[1] == Welcome(welcome)


def _otherwise(hello: Hello, draw: random.Random) -> Hello:
    """Returns what somebody says of himself who may say anything."""
    other = message_of(Hello, draw)
    names = draw.sample(hello.__struct_fields__, draw.choice((1, 1, 2)))
    if draw.random() < 0.4:
        tasks = ("worker:-1", "worker:01", "worker:99999", "Worker:0", "worker:0\n", "worker")
        return msgspec.structs.replace(hello, task=draw.choice(tasks))
    return msgspec.structs.replace(hello, **{name: getattr(other, name) for name in names})


def _interfered(
    message: Message, data: bytes, heard: Sequence[Message], draw: random.Random
) -> bytes:
    """Returns what arrives in place of a message."""
    way = draw.randrange(8)
    if way == 7 and isinstance(message, Hello):  # what would do as well, were it not for the proof
        changed = {"epoch": ("", EPOCH), "incarnation": (0, 3, 4), "task": TASKS}
        field = draw.choice(list(changed))
        other = msgspec.structs.replace(message, **{field: draw.choice(changed[field])})
        return framed(other, HANDSHAKE_CATALOG.encode(other), sequence=0)
    if way == 0:
        return damaged_bytes(data, draw)
    if way in (1, 2):
        plain = damaged_value(msgspec.msgpack.decode(HANDSHAKE_CATALOG.encode(message)), draw)
        try:
            return framed(message, msgspec.msgpack.encode(plain), sequence=0)
        except OverflowError:
            return b""
    if way == 3:
        return data + data
    if way == 4:
        return data[: draw.randrange(len(data))]
    another = draw.choice(heard) if way == 5 and heard else message_of(draw.choice(KINDS), draw)
    return framed(another, HANDSHAKE_CATALOG.encode(another), sequence=0)


# Against a client --------------------------------------------------------------------------------


class _Impatient:
    """A clock on which each look takes a second: who waits in vain gives up at once."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 1.0
        return self._now


class _Server(Stream):
    """The stream of a client: an honest server answers what it writes, and somebody interferes."""

    peer = "fuzzer"
    called = ADDRESS

    def __init__(self, draw: random.Random, secret: bytes, descriptor: int) -> None:
        self.honest = ServerHandshake(JOB, secret, EPOCH, serves=(SERVER,), called=ADDRESS)
        self.said: list[Message] = []
        self.sent: list[Message] = []
        self._draw = draw
        self._descriptor = descriptor
        self._coming = b""
        self._left = 2

    def fileno(self) -> int:
        return self._descriptor

    def write(self, buffers: Any) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        for message in _received(data):
            self.said.append(message)
            answer = self.honest.answer(message)
            self.sent.append(answer)
            coming = framed(answer, HANDSHAKE_CATALOG.encode(answer), sequence=0)
            if self._draw.random() < 0.6:
                heard = [*self.sent, *self.said]
                coming = _interfered(answer, coming, heard, self._draw)
            self._coming += coming
        return len(data)

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        if not self._coming:
            self._left -= 1
            if not self._left:
                raise PeerClosed("the fuzzer closes")
            return 0
        taken = min(len(buffers[0]), len(self._coming))
        buffers[0][:taken] = self._coming[:taken]
        self._coming = self._coming[taken:]
        return taken

    def close(self) -> None:
        pass


_ALWAYS_READY = os.open(os.devnull, os.O_RDWR)


def _against_client(draw: random.Random) -> str:
    knows = draw.random() < 0.7
    server = _Server(draw, SECRET if knows else draw.randbytes(32), _ALWAYS_READY)
    connection = Connection(server, HANDSHAKE_CATALOG, clock=_Impatient())
    identity = Identity(JOB, draw.choice(TASKS), 3, draw.choice(("", EPOCH)))
    who = "between" if knows else "without the secret"
    try:
        authenticate(connection, identity, SECRET, server=SERVER, timeout=60.0)
    except WireError:
        return f"{who}, to a client: refused"
    hello, proof = server.said
    challenge, welcome = server.sent
    assert isinstance(hello, Hello) and isinstance(proof, Proof)
    assert knows, "a server without the secret was taken for the job's"
    assert isinstance(challenge, Challenge) and isinstance(welcome, Welcome)
    assert server.honest.identity == identity, "the server did not admit this client"
    assert proof.hmac == mac(SECRET, b"trireme handshake 2 client", hello, challenge)
    assert welcome.hmac == mac(SECRET, b"trireme handshake 2 server", hello, challenge, proof)
    return f"{who}, to a client: admitted"

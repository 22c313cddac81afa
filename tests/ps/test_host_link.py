"""A worker's way to the aggregator of its host, and on without it."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from trireme.ps import host_link
from trireme.ps.dense import PartBuffer
from trireme.ps.host_link import HostLink
from trireme.ps.layout import Layout
from trireme.ps.loan import Loan
from trireme.ps.messages import (
    Applied,
    Duplicate,
    Enlist,
    FencedVerdict,
    MemoryLent,
    ParameterSpec,
    Push,
    PushReply,
    RejectedVerdict,
    Stale,
    Thawed,
    Verdict,
    Waiting,
)
from trireme.ps.rule import Rule
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import Identity
from trireme.wire.message import Message
from trireme.wire.shared_memory import SharedMemory, available
from trireme.wire.shm import ShmStream

LAYOUT = Layout.of([ParameterSpec("a", (16,), "float32", 0)], servers=1)


class Answering:
    """A connection over which come these messages."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.lending: object = None

    def send(self, message: Message, payload: object = (), **how: object) -> None:
        pass

    def receive(self, *, timeout: float) -> Incoming:
        return Incoming(self.messages.pop(0), 1, (), 0)

    def close(self) -> None:
        pass


def link_to(address: str = "shm://trireme-test-nobody") -> HostLink:
    gradients, values = PartBuffer(LAYOUT, 0), PartBuffer(LAYOUT, 0)
    identity = Identity("job", "worker:0", 1)
    return HostLink(address, identity, b"s" * 32, gradients, values, loan=None, silence=1.0)


@pytest.mark.parametrize(
    ("verdict", "counts"),
    [
        (Applied(1), True),
        (Stale(1), True),
        (Duplicate(Applied(1)), False),
        (FencedVerdict(2, "out"), False),
        (RejectedVerdict("no sense"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_verdict_of_a_round_is_asked_of_the_server(
    verdict: Verdict, counts: bool
) -> None:
    link = link_to()
    reply = PushReply(verdict, 1, 0, False)
    waiting = Waiting("round 1", ("worker:1",), 1.0)
    link._connection = cast(Connection, Answering(waiting, reply))
    link._sequence = 1
    heard: list[object] = []
    assert link.wait(1.0, heard.append) == (reply if counts else None)
    assert heard == [waiting]


def test_an_aggregator_that_is_gone_is_tried_less_and_less_often_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_link, "_LONGEST_PAUSE", 3.0)
    link = link_to()
    with caplog.at_level(logging.WARNING, logger="trireme.ps"):
        link.enlist(Enlist(0, 1, LAYOUT.spec, Rule(0, 0), "tcp://h:1"), patience=0.0)
        pauses = [link._pause]
        for _ in range(2):
            assert not link.push(Push(0, 1, 1, 1, 0, 0, 1.0)), "it is not tried yet"
            assert pauses[-1] == link._pause
            link._again = 0.0
            assert not link.push(Push(0, 1, 1, 1, 0, 0, 1.0))
            pauses.append(link._pause)
    assert pauses == [2.0, 3.0, 3.0]
    assert caplog.text.count("worker:0 pushes to the server by itself") == 1


@pytest.mark.skipif(not available(), reason="lent memory needs Linux")
@pytest.mark.parametrize(
    ("answer", "lent"),
    [(MemoryLent(True), True), (MemoryLent(False), False), (Thawed(), False)],
    ids=["accepted", "refused", "something else"],
)
def test_memory_is_lent_only_to_who_accepts_it(answer: Message, lent: bool) -> None:
    memory = SharedMemory.create(4096)
    loan = Loan(memory, memory.places([(0, 64)]))

    class Stream:
        def pass_descriptor(self, descriptor: int) -> None:
            pass

    connection = Answering(answer)
    given: Any = connection
    assert loan.offer(given, cast(ShmStream, Stream()), timeout=1.0) is lent
    assert (connection.lending is not None) is lent

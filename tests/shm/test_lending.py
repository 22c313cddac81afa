"""Payloads in lent memory: by reference one way, copied there the other, bytes where they must."""

from __future__ import annotations

from typing import ClassVar

import pytest

from trireme.errors import FrameError
from trireme.shm.memory import Lending
from trireme.wire.connection import Connection
from trireme.wire.message import Catalog, Message
from trireme.wire.transport import Stream, connect, listen


class Note(Message, frozen=True, array_like=True):
    kind: ClassVar[int] = 200
    text: str


CATALOG = Catalog([Note])


def pair() -> tuple[Connection, Connection]:
    listener = listen("shm://")
    client = connect(listener.address, timeout=5)
    server: Stream | None = listener.accept()
    assert server is not None
    listener.close()
    return Connection(client, CATALOG), Connection(server, CATALOG)


@pytest.fixture
def memory() -> tuple[tuple[memoryview, ...], tuple[memoryview, ...]]:
    """Returns outbound and inbound places, as two processes would both have them mapped."""
    whole = memoryview(bytearray(4096))
    return (whole[0:1000], whole[1000:1500]), (whole[2000:3000],)


def lend(
    lender: Connection,
    borrower: Connection,
    memory: tuple[tuple[memoryview, ...], tuple[memoryview, ...]],
) -> None:
    lender.lending = Lending(memory[1], memory[0], borrowed=False)
    borrower.lending = Lending(*memory, borrowed=True)


def test_what_the_lender_sends_from_there_is_seen_in_place(memory) -> None:
    lender, borrower = pair()
    lend(lender, borrower, memory)
    outbound, _ = memory
    outbound[1][:3] = b"abc"
    sent = lender.bytes_sent
    lender.send(Note("push"), outbound, sequence=7, timeout=5)
    incoming = borrower.receive(timeout=5)
    assert (incoming.message, incoming.sequence, incoming.nbytes) == (Note("push"), 7, 1500)
    assert incoming.payload is borrower.lending.incoming
    assert bytes(incoming.payload[1][:3]) == b"abc"
    assert lender.bytes_sent - sent < 100


def test_what_the_borrower_answers_is_put_where_the_lender_wants_it(memory) -> None:
    lender, borrower = pair()
    lend(lender, borrower, memory)
    values = memoryview(b"v" * 1000)
    sent = borrower.bytes_sent
    assert borrower.offer(Note("values"), (values,), sequence=1)
    incoming = lender.receive(timeout=5)
    assert incoming.payload is memory[1]
    assert bytes(memory[1][0]) == b"v" * 1000
    assert borrower.bytes_sent - sent < 100


@pytest.mark.parametrize("payload", [[b"x" * 999], [b"x" * 500, b"x" * 500], [b"x" * 1001]])
def test_what_does_not_fit_crosses_as_bytes(memory, payload) -> None:
    lender, borrower = pair()
    lend(lender, borrower, memory)
    borrower.offer(Note("other"), payload)
    incoming = lender.receive(timeout=5)
    assert b"".join(map(bytes, incoming.payload)) == b"".join(payload)
    assert not any(memory[1][0])


def test_an_equal_payload_that_lies_elsewhere_crosses_as_bytes(memory) -> None:
    lender, borrower = pair()
    lend(lender, borrower, memory)
    elsewhere = tuple(memoryview(bytes(view)) for view in memory[0])
    lender.send(Note("push"), elsewhere, timeout=5)
    incoming = borrower.receive(timeout=5)
    assert incoming.payload is not borrower.lending.incoming
    assert incoming.nbytes == 1500


def test_messages_without_payload_are_as_always(memory) -> None:
    lender, borrower = pair()
    lend(lender, borrower, memory)
    lender.send(Note("hello"), timeout=5)
    borrower.offer(Note("hello too"))
    assert borrower.receive(timeout=5).payload == ()
    assert lender.receive(timeout=5).payload == ()


def test_a_reference_where_nothing_was_lent_is_refused(memory) -> None:
    lender, borrower = pair()
    lender.lending = Lending(memory[1], memory[0], borrowed=False)
    lender.send(Note("push"), memory[0], timeout=5)
    with pytest.raises(FrameError, match="none such was lent"):
        borrower.receive(timeout=5)


def test_a_reference_of_another_length_is_refused(memory) -> None:
    lender, borrower = pair()
    lender.lending = Lending(memory[1], memory[0], borrowed=False)
    borrower.lending = Lending((memory[0][0],), memory[1], borrowed=True)
    lender.send(Note("push"), memory[0], timeout=5)
    with pytest.raises(FrameError, match="none such was lent"):
        borrower.receive(timeout=5)

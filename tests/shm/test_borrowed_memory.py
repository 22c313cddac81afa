"""A worker lends one memory to all servers of its host, over a connection for each shard."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import cast

import pytest

from trireme.ps.lending_messages import LendMemory
from trireme.shm.borrowed_memory import BorrowedMemory
from trireme.shm.memory import SharedMemory, available
from trireme.wire.service import Link

pytestmark = pytest.mark.skipif(not available(), reason="needs Linux")


class Lender:
    """The link of a worker that lends memory."""

    def __init__(self, memory: SharedMemory) -> None:
        stream = SimpleNamespace(take_descriptor=lambda: os.dup(memory.fileno()))
        self.connection = SimpleNamespace(stream=stream, lending=None)
        self.identity = SimpleNamespace(task="worker:0")


def link(memory: SharedMemory) -> Link:
    return cast(Link, Lender(memory))


def test_memory_has_one_identity_in_every_process_that_maps_it() -> None:
    lender = SharedMemory.create(4096)
    borrower = SharedMemory.attach(os.dup(lender.fileno()), 4096)
    other = SharedMemory.create(4096)
    assert lender.identity == borrower.identity != other.identity


def test_memory_is_known_as_long_as_one_connection_lends_it() -> None:
    memory, borrowed = SharedMemory.create(4096), BorrowedMemory()
    links = [link(memory), link(memory)]
    for number, each in enumerate(links):
        assert borrowed.add(each, LendMemory(4096, ((8 * number, 8),), ()))
    assert borrowed.identities == (memory.identity,)
    assert borrowed.remove(links[0]) is None
    assert borrowed.find(memory.identity) is not None
    assert borrowed.remove(links[1]) == memory.identity
    assert borrowed.find(memory.identity) is None
    assert borrowed.identities == ()
    assert borrowed.remove(links[1]) is None, "it is closed already"


def test_a_push_has_a_place_where_it_came_through_the_memory() -> None:
    memory, borrowed = SharedMemory.create(4096), BorrowedMemory()
    lender = link(memory)
    borrowed.add(lender, LendMemory(4096, ((0, 8),), ()))
    lending = lender.connection.lending
    assert lending is not None
    place = borrowed.place_of(lender, lending.incoming)
    assert place is not None and (place.memory, place.places) == (memory.identity, ((0, 8),))
    assert borrowed.place_of(lender, (memoryview(bytearray(8)),)) is None, "it was sent"

"""Memory that a worker lends is looked at only where it can be, and leaves no descriptor behind."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast
from unittest.mock import Mock

import pytest

from tests.descriptors import open_descriptors
from trireme.ps.lending_messages import LendMemory
from trireme.shm.borrowed_memory import BorrowedMemory
from trireme.shm.memory import SharedMemory
from trireme.shm.transport import ShmStream
from trireme.wire.handshake import Identity
from trireme.wire.service import Link

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory.create(4096)
    yield memory
    memory.close()


@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        (LendMemory(4096, ((0, 8), (64, 8)), ((128, 16),)), True),
        (LendMemory(4096, ((0, 1 << 40),), ()), False),
        (LendMemory(4096, (), ((-8, 8),)), False),
        (LendMemory(1 << 40, ((0, 8),), ()), False),
        (LendMemory(0, (), ()), False),
    ],
)
def test_memory_that_is_lent_leaves_no_descriptor(
    memory: SharedMemory, message: LendMemory, accepted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # A record would keep the frames' memory.
    caplog.set_level(logging.ERROR, "trireme.shm.borrowed_memory")
    before = open_descriptors()
    one, other = socket.socketpair(socket.AF_UNIX)
    worker, server = ShmStream(one, "shm://server"), ShmStream(other, "shm://worker", accepted=True)
    worker.pass_descriptor(memory.fileno())
    worker.write([b"!"])
    server.read_into([memoryview(bytearray(8))])
    connection = SimpleNamespace(stream=server, lending=None)
    link = Mock(identity=Identity("job", "worker:0", 0), connection=connection)
    borrowed = BorrowedMemory()
    assert borrowed.add(cast(Link, link), message) == accepted
    assert (connection.lending is not None) == accepted
    if accepted:
        memory.view[64:72] = b"gradient"
        assert bytes(connection.lending.incoming[1]) == b"gradient"
    worker.close()
    server.close()
    # What these look at stays mapped until then, and a mapping has a descriptor of its own.
    del link, connection, borrowed
    assert open_descriptors() == before

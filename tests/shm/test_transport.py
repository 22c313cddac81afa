"""Descriptors that cross a `shm://` connection: one is taken, and none is left behind."""

from __future__ import annotations

import array
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from tests.descriptors import open_descriptors
from trireme.shm.transport import ShmStream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")


@pytest.fixture
def passed() -> Iterator[int]:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def send(sender: socket.socket, descriptors: list[int]) -> None:
    rights = array.array("i", descriptors)
    sender.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("take", [True, False])
def test_no_descriptor_is_left_however_many_are_passed(passed: int, count: int, take: bool) -> None:
    before = open_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    stream = ShmStream(theirs, "shm://here", accepted=True)
    room = memoryview(bytearray(8))
    for _ in range(2):  # what comes after the first is not taken either
        send(ours, [passed] * count)
        assert stream.read_into([room]) == 1
    assert open_descriptors() == before + 3
    if take:
        taken = stream.take_descriptor()
        assert taken is not None
        assert os.path.samestat(os.fstat(taken), os.fstat(passed))
        os.close(taken)
        assert stream.take_descriptor() is None
    stream.close()
    ours.close()
    assert open_descriptors() == before


def test_the_side_that_connected_takes_none(passed: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    stream = ShmStream(theirs, "shm://here")
    before = open_descriptors()
    send(ours, [passed])
    assert stream.read_into([memoryview(bytearray(8))]) == 1
    assert stream.take_descriptor() is None
    assert open_descriptors() == before
    stream.close()
    ours.close()

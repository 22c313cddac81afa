"""The proxy does to a connection what it says, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.faults import Proxy

SECONDS = 10.0


class Ends:
    """Both ends of a connection that goes through a proxy."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.proxy = Proxy(f"tcp://127.0.0.1:{self.listener.getsockname()[1]}")
        host, _, port = self.proxy.address.removeprefix("tcp://").rpartition(":")
        self.near = socket.create_connection((host, int(port)), timeout=SECONDS)
        self.far, _ = self.listener.accept()
        self.far.settimeout(SECONDS)

    def close(self) -> None:
        for each in (self.near, self.far, self.listener, self.proxy):
            each.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as made:
        yield made


def received(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := end.recv(count - len(data))):
        data += more
    return data


def nothing_comes(end: socket.socket) -> bool:
    end.settimeout(0.05)
    try:
        return end.recv(1) == b"?"
    except TimeoutError:
        return True
    finally:
        end.settimeout(SECONDS)


def test_bytes_pass_both_ways(ends: Ends) -> None:
    ends.near.sendall(b"there")
    assert received(ends.far, 5) == b"there"
    ends.far.sendall(b"back")
    assert received(ends.near, 4) == b"back"


def test_one_way_is_held_and_the_other_is_not(ends: Ends) -> None:
    ends.proxy.up.hold()
    ends.near.sendall(b"there")
    ends.far.sendall(b"back")
    assert received(ends.near, 4) == b"back"
    assert nothing_comes(ends.far)
    ends.proxy.up.flow()
    assert received(ends.far, 5) == b"there"


def test_a_half_open_connection_loses_what_one_side_says(ends: Ends) -> None:
    ends.proxy.down.lossy = True
    ends.far.sendall(b"back")
    ends.near.sendall(b"there")
    assert received(ends.far, 5) == b"there"
    assert nothing_comes(ends.near)
    ends.proxy.down.lossy = False
    ends.far.sendall(b"again")
    assert received(ends.near, 5) == b"again"


def test_a_cut_resets_both_sides(ends: Ends) -> None:
    ends.near.sendall(b"x")
    assert received(ends.far, 1) == b"x"
    ends.proxy.cut()
    for end in (ends.near, ends.far):
        with pytest.raises(ConnectionResetError):
            while end.recv(1):
                pass


def test_a_slow_link_takes_its_time(ends: Ends) -> None:
    ends.proxy.up.rate = 100_000.0
    began = time.monotonic()
    threading.Thread(target=ends.near.sendall, args=(bytes(20_000),), daemon=True).start()
    assert len(received(ends.far, 20_000)) == 20_000
    assert time.monotonic() - began >= 0.19


def test_a_delay_is_added(ends: Ends) -> None:
    ends.proxy.delay(0.05)
    began = time.monotonic()
    ends.near.sendall(b"x")
    assert received(ends.far, 1) == b"x"
    assert time.monotonic() - began >= 0.05

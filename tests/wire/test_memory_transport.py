from __future__ import annotations

import threading

import pytest

from tests import memory_transport as memory
from tests.conformance import PATIENCE, read_exactly, wait_readable, write_all
from trireme.errors import ConnectionRefused, ConnectTimeout, PeerClosed, WireError
from trireme.wire.transport import connect, listen


def test_names_are_kept_apart() -> None:
    listener = memory.listen("name")
    other = memory.listen("another name")
    other.close()
    with pytest.raises(ConnectionRefused, match="memory://another name"):
        memory.connect("another name", timeout=PATIENCE)
    memory.connect("name", timeout=PATIENCE).close()
    listener.close()


def test_a_listener_that_is_closed_again_leaves_the_name_to_its_successor() -> None:
    first = memory.listen("name")
    first.close()
    second = memory.listen("name")
    first.close()
    memory.connect("name", timeout=PATIENCE).close()
    second.close()


def test_an_address_with_a_name() -> None:
    listener = listen("memory://a name")
    assert listener.address == "memory://a name"
    ours = connect("memory://a name", timeout=PATIENCE)
    assert ours.peer == "memory://a name"
    ours.close()
    listener.close()


def test_a_writer_is_told_that_the_peer_closed() -> None:
    listener = memory.listen("")
    ours, theirs = listener.admit(), listener.accept()
    assert theirs is not None
    theirs.close()
    for buffers in ([b"x"], [b"x", b"y"]):
        with pytest.raises(PeerClosed, match=f"{listener.address} closed"):
            ours.write(buffers)
    ours.close()
    listener.close()


def test_a_listener_that_never_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.memory_transport._BACKLOG", 2)
    listener = memory.listen("")
    waiting = [listener.admit(), listener.admit()]
    with pytest.raises(ConnectTimeout, match="has 2 connections waiting"):
        listener.admit()
    accepted = listener.accept()
    assert accepted is not None
    waiting.append(listener.admit())
    for stream in (*waiting, accepted):
        stream.close()
    listener.close()


def test_too_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(24, "Too many open files")

    listener = memory.listen("name")
    monkeypatch.setattr(memory.socket, "socketpair", full)
    with pytest.raises(WireError, match="Too many open files"):
        memory.connect("name", timeout=PATIENCE)
    with pytest.raises(WireError, match="Too many open files"):
        memory.listen("another")
    monkeypatch.undo()
    memory.listen("another").close()
    listener.close()


def test_threads_may_connect_at_once() -> None:
    listener = listen("memory://")
    start = threading.Barrier(8)

    def call(number: int) -> None:
        start.wait(PATIENCE)
        for _ in range(20):
            stream = connect(listener.address, timeout=PATIENCE)
            write_all(stream, bytes([number]))
            stream.close()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    numbers = []
    while len(numbers) < 160:
        wait_readable(listener)
        stream = listener.accept()
        assert stream is not None
        numbers.append(read_exactly(stream, 1)[0])
        stream.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(numbers) == sorted(list(range(8)) * 20)
    assert listener.accept() is None
    listener.close()

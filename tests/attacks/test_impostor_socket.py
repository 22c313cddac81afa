"""Somebody binds the name of a server's unix socket before the server does, and is `ps:0` there.

He passes the handshake on to the server's real port, which he knows, and waits for the descriptor
of the worker's memory: with it he would read the parameters and write the gradients.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from tests.ps.server.test_service import JOB, SECRET, joined, plain, train
from trireme.cluster.view import ServerEntry, View, WorkerEntry
from trireme.ps.rule import Rule
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.service import beside
from trireme.shm.transport import shm_address
from trireme.wire.service import Service
from trireme.wire.transport import Listener, listen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")

STEPS = 5


class Relay:
    """Listens under a server's name, and passes on what is said between it and who comes.

    Attributes:
        visits: how many came.
        heard: what they have said.
        descriptors: what they have passed.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + shm_address(address).removeprefix("shm://"))
        self._listener.listen()
        self.visits = 0
        self.heard = b""
        self.descriptors: list[int] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                victim, _ = self._listener.accept()
                self.visits += 1
                server = socket.create_connection(self._server)
                for ends in ((victim, server), (server, victim)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while True:
                if source.family == socket.AF_UNIX:
                    data, descriptors, _, _ = socket.recv_fds(source, 1 << 16, 4)
                    self.descriptors += descriptors
                    self.heard += data
                else:
                    data = source.recv(1 << 16)
                if not data:
                    break
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@contextmanager
def serving(listener: Listener) -> Iterator[View]:
    """A real server on a port whose name for memory is taken already."""
    entry = ServerEntry(0, 1, listener.address)
    view = View(1, (entry,), (WorkerEntry(0, 1),))
    handler = ShardHandler(0)
    service = Service(listener, [handler], job=JOB, secret=SECRET, serves=("ps:0",))
    service.listeners += beside(listener.address)
    service.call_soon(lambda: handler.view(view))
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    try:
        yield view
    finally:
        service.stop()
        thread.join(10)


def check_training_goes_on(listener: Listener) -> None:
    """A worker trains with the real server."""
    with serving(listener) as view:
        client, flat = joined(view, shared=True, rule=Rule())
        values = train(client, flat, STEPS)
        client.close()
    for name, expected in plain(STEPS).items():
        torch.testing.assert_close(values[name], expected, rtol=0, atol=1e-5)


def test_who_passes_the_handshake_on_gets_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    listener = listen("tcp://127.0.0.1:0")
    relay = Relay(listener.address)
    try:
        check_training_goes_on(listener)
        assert relay.visits == 1
        assert b"worker:0" in relay.heard  # it had the words of the handshake, and they were no use
        assert relay.descriptors == []
    finally:
        relay.close()
    assert "worker:0 goes on over TCP to ps:0: worker:0 called shm://trireme-" in caplog.text
    assert "something between them relays the connection" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start the process of another user")
def test_another_user_hears_nothing(caplog: pytest.LogCaptureFixture) -> None:
    listener = listen("tcp://127.0.0.1:0")
    name = shm_address(listener.address).removeprefix("shm://")
    impostor = subprocess.Popen(
        [sys.executable, "-c", _IMPOSTOR, name], stdout=subprocess.PIPE, text=True
    )
    try:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "listening\n"
        check_training_goes_on(listener)
        assert impostor.stdout.readline() == "heard b''\n"
    finally:
        impostor.kill()
        impostor.communicate()
    assert "worker:0 goes on over TCP to ps:0: a process of another user (uid 65534)" in caplog.text


_IMPOSTOR = """
import os, socket, sys
os.setuid(65534)
impostor = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
impostor.bind("\\0" + sys.argv[1])
impostor.listen()
print("listening", flush=True)
victim, _ = impostor.accept()
print("heard", victim.recv(100), flush=True)
"""

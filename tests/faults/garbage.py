"""Bytes that are not frames, sent to a service by a process that has not authenticated."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from trireme.wire.message import MAGIC, PROTOCOL_VERSION


def send_garbage(port: int) -> None:
    """Sends bytes that are not frames: the service closes each connection without an answer."""
    header = struct.Struct("!4sBBHIQQ")
    hello = header.pack(MAGIC, PROTOCOL_VERSION, 1, 0, 40, 0, 0)
    for said in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        header.pack(MAGIC, PROTOCOL_VERSION, 1, 0, 1 << 31, 0, 0),
        header.pack(MAGIC, PROTOCOL_VERSION, 1, 0, 16, 1 << 60, 0),
        hello + b"\xff" * 40,
        hello + b"\x95",  # and no more of it
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):  # there was more to read when it was closed
                assert connection.recv(100) == b""

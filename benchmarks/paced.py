"""A slower network on loopback: the kernel spaces out what this process's TCP sockets send."""

from __future__ import annotations

import socket
from unittest import mock

from trireme.wire.transports import tcp

_SO_MAX_PACING_RATE = 47  # Linux; Python has no name for it


def pace(bits: float) -> None:
    """Has every TCP socket that this process opens from now on send at most so many bits a second.

    Accepted sockets have the pace of the one that listens. Zero changes nothing.
    """
    if not bits:
        return
    set_buffers = tcp._set_buffers
    rate = int(bits / 8).to_bytes(8, "little")

    def slower(unconnected: socket.socket) -> None:
        set_buffers(unconnected)
        unconnected.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)

    mock.patch.object(tcp, "_set_buffers", slower).start()

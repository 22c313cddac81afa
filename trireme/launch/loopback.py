"""Keeps processes that hold a model together off the network where all of them are on one host.

gloo and NCCL listen at the address that the host's name resolves to, or at a network card's. Only
variables of the environment say otherwise.
"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

__all__ = ["LISTEN_VARIABLES", "stay_on_loopback"]

LISTEN_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Names the loopback interface to both, where the user has named no other."""
    for variable in LISTEN_VARIABLES:
        environ.setdefault(variable, _interface())


def _interface() -> str:
    import psutil  # rarely needed, and slow to load

    for name, entries in psutil.net_if_addrs().items():
        if any(e.family == socket.AF_INET and e.address == "127.0.0.1" for e in entries):
            return name
    return "lo"

"""Keeps a process group whose processes are all on one host off the network.

gloo and NCCL listen at the address that the host's name resolves to, or at a network card's. Only
environment variables change that.
"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

__all__ = ["LISTEN_VARIABLES", "stay_on_loopback"]

LISTEN_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def stay_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Has gloo and NCCL use the loopback interface, unless the user has named another one."""
    for variable in LISTEN_VARIABLES:
        environ.setdefault(variable, _interface())


def _interface() -> str:
    import psutil  # rarely needed, and slow to load

    for name, entries in psutil.net_if_addrs().items():
        if any(e.family == socket.AF_INET and e.address == "127.0.0.1" for e in entries):
            return name
    return "lo"

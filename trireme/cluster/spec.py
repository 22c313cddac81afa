"""The names of tasks, and addresses."""

from __future__ import annotations

import ipaddress

from trireme.errors import ConfigurationError

LOOPBACK = "127.0.0.1"

ROLES = ("coordinator", "ps", "worker")

OBSERVER = "observer:0"  # knows the job's secret and is no member, such as `trireme status`


def task_name(role: str, index: int) -> str:
    """Returns a task's name, such as `ps:0`."""
    return f"{role}:{index}"


def is_loopback(address: str) -> bool:
    """Returns whether a `host:port` can only be reached from its own host."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(name: str, address: str) -> None:
    """Raises `ConfigurationError` if a task's address is not `host:port`."""
    host, colon, port = address.rpartition(":")
    valid_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not colon or not host or not valid_port or bare_ipv6 or "/" in address:
        raise ConfigurationError(
            f"the address of {name} is {address!r}: write host:port with a port of 1 to 65535, "
            "and an IPv6 host in brackets"
        )

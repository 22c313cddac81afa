"""Hosts in this machine: network namespaces with addresses and names of their own, on one switch.

Each host is connected by a virtual cable to a bridge, which this process is connected to as well.
Hosts are cut off and slowed at the cable, so that nobody is told: what is sent just does not come.
Two hosts are cut from each other alone by a wrong hardware address in both.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil

NOWHERE = "02:00:00:00:de:ad"
"""A hardware address that nobody has."""
NETWORK = "198.18"
"""The addresses that RFC 2544 keeps for tests of networks."""
OWN = 254
"""The number of this process in the network; hosts count from 1."""


class NoHosts(Exception):
    """This machine or user has no network namespaces; says what is missing."""


@dataclass
class Host:
    """One host.

    Attributes:
        name: its name, which `socket.gethostname` gives there.
        namespace: of the network.
        address: its IP address.
        inner: the end of its cable that it has.
        outer: the end at the switch.
    """

    name: str
    namespace: str
    address: str
    inner: str
    outer: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command line that runs a command on this host, as the same process."""
        named = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        return [
            *("ip", "netns", "exec", self.namespace),
            *("unshare", "--uts", "sh", "-c", named, self.name),
            *words,
        ]


@dataclass
class Network:
    """Hosts on one switch; made by `network`.

    Attributes:
        bridge: the switch.
        own: the address of this process.
        hosts: all hosts.
    """

    bridge: str
    own: str
    hosts: list[Host] = field(default_factory=list)
    lost: set[tuple[str, str]] = field(default_factory=set)

    # The cable -------------------------------------------------------------------------------

    def cut(self, host: Host) -> None:
        """Takes a host off the switch: nothing reaches it or comes from it, and nobody is told."""
        _run("ip", "link", "set", host.outer, "nomaster")

    def heal(self, host: Host) -> None:
        """Connects a host again, in both directions and at full speed."""
        _run("ip", "link", "set", host.outer, "master", self.bridge, "up")
        for sender, receiver in list(self.lost):
            if host.name in (sender, receiver):
                self._set_neighbour(sender, receiver, known=True)
        for side in (self._inside(host), ()):
            device = host.inner if side else host.outer
            _run("tc", *side, "qdisc", "del", "dev", device, "root", fails=True)

    def mute(self, host: Host) -> None:
        """Loses what a host sends to the others and to this process; what they send arrives."""
        for other in (*(each.name for each in self.hosts if each is not host), ""):
            self._set_neighbour(host.name, other, known=False)

    def deafen(self, host: Host) -> None:
        """Loses what others and this process send to a host; what it sends arrives."""
        for other in (*(each.name for each in self.hosts if each is not host), ""):
            self._set_neighbour(other, host.name, known=False)

    def part(self, one: Host, other: Host) -> None:
        """Loses what two hosts send to each other; all others reach both."""
        self._set_neighbour(one.name, other.name, known=False)
        self._set_neighbour(other.name, one.name, known=False)

    def slow(self, host: Host, bytes_per_second: int, queue_seconds: float = 0.5) -> None:
        """Lets so many bytes a second through a host's cable, in each direction."""
        shape = ("rate", f"{bytes_per_second * 8}bit", "burst", str(max(3000, bytes_per_second)))
        queue = ("latency", f"{queue_seconds * 1000:.0f}ms")
        for side, device in ((self._inside(host), host.inner), ((), host.outer)):
            words = ("qdisc", "replace", "dev", device, "root", "tbf", *shape, *queue)
            _run("tc", *side, *words)

    def _set_neighbour(self, sender: str, receiver: str, *, known: bool) -> None:
        """Has one host know another's hardware address, or a wrong one. "" is this process."""
        there = self._named(sender)
        to = self._named(receiver)
        address = to.address if to else self.own
        namespace = self._inside(there) if there else ()
        device = there.inner if there else self.bridge
        words: tuple[str, ...] = ("neigh", "del", address, "dev", device)
        if not known:
            words = ("neigh", "replace", address, "lladdr", NOWHERE, "nud", "permanent")
            words += ("dev", device)
        _run("ip", *namespace, *words, fails=known)
        change = self.lost.discard if known else self.lost.add
        change((sender, receiver))

    def _named(self, name: str) -> Host | None:
        return next((host for host in self.hosts if host.name == name), None)

    def _inside(self, host: Host) -> tuple[str, str]:
        return ("-n", host.namespace)


@contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Makes hosts of these names while the block runs.

    Raises:
        NoHosts: this machine has no network namespaces, or this user may not make any.
    """
    number = secrets.choice(_free_numbers())  # other tests of this machine make networks too
    prefix = f"{NETWORK}.{number}"
    made = Network(f"tr{number:x}-{secrets.token_hex(1)}", f"{prefix}.{OWN}")
    try:
        try:
            _build(made, prefix, names)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise NoHosts(f"no hosts can be made here: {said.strip()}") from error
        yield made
    finally:
        _remove(made)


def _free_numbers() -> list[int]:
    """Returns the numbers of networks that no interface here has an address in."""
    taken = {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    }
    return [number for number in range(256) if f"{NETWORK}.{number}.{OWN}" not in taken]


def _build(made: Network, prefix: str, names: Sequence[str]) -> None:
    _run("ip", "link", "add", made.bridge, "type", "bridge")
    _run("ip", "addr", "add", f"{made.own}/24", "dev", made.bridge)
    _run("ip", "link", "set", made.bridge, "up")
    for number, name in enumerate(names, start=1):
        short = f"{made.bridge}n{number}"
        host = Host(name, short, f"{prefix}.{number}", f"{short}i", f"{short}o")
        _run("ip", "netns", "add", host.namespace)
        made.hosts.append(host)
        _run("ip", "link", "add", host.outer, "type", "veth", "peer", "name", host.inner)
        _run("ip", "link", "set", host.inner, "netns", host.namespace)
        _run("ip", "link", "set", host.outer, "master", made.bridge, "up")
        inside = ("ip", "-n", host.namespace)
        _run(*inside, "addr", "add", f"{host.address}/24", "dev", host.inner)
        _run(*inside, "link", "set", host.inner, "up")
        _run(*inside, "link", "set", "lo", "up")


def _remove(made: Network) -> None:
    for host in made.hosts:
        with suppress(OSError):
            _run("ip", "link", "del", host.outer, fails=True)
            _run("ip", "netns", "del", host.namespace, fails=True)
    with suppress(OSError):
        _run("ip", "link", "del", made.bridge, fails=True)


def _run(*words: str, fails: bool = False) -> None:
    subprocess.run(words, check=not fails, capture_output=True, text=True, timeout=20)

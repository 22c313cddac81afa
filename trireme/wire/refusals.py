"""The limits of a service's peers, and of refused connections: few are logged, many slowed down."""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass, field

from trireme.printable import printable
from trireme.wire.handshake import HANDSHAKE_TIMEOUT
from trireme.wire.message import Limits

_log = logging.getLogger(__name__)

BURST = 20  # lines that may be logged at once after a quiet time
LINE_SECONDS = 10.0  # after that, one line in so many seconds
_HOSTS = 1024  # how many are remembered


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits that a service sets to its peers, and how often it looks at them."""

    frame: Limits = field(
        default_factory=Limits
    )  # the largest frame of a peer that has authenticated
    tick_seconds: float = 0.1
    unauthenticated: int = 128  # connections at a time; one more, and the oldest is closed
    connections: int = 4096  # that may be open at a time; one more is closed at once
    handshake_seconds: float = HANDSHAKE_TIMEOUT  # that of TLS included, however little comes
    tries: int = 20  # connections of one host that may be refused before it is not listened to
    try_seconds: float = 1.0  # after so long a host has one more try
    unsent_bytes: int = 1 << 28  # of a link when the next message is offered: its peer must read
    linger_seconds: float = 2.0  # how long a closing link, or service, sends what was offered


@dataclass(slots=True)
class TokenBucket:
    """Tokens that are taken one by one, and come back after so many seconds each."""

    most: int
    seconds: float
    _left: float = -1.0
    _since: float = 0.0

    def has(self, now: float) -> bool:
        if self._left < 0.0:
            self._left = float(self.most)
        else:
            passed = max(0.0, now - self._since)
            self._left = min(float(self.most), self._left + passed / self.seconds)
        self._since = now
        return self._left >= 1.0

    def take(self, now: float) -> bool:
        there = self.has(now)
        self._left -= there
        return there


class Refusals:
    """Logs the refused connections of one service at a limited rate, and counts all."""

    def __init__(self) -> None:
        self.count = 0
        self._unlogged = 0
        self._lines = TokenBucket(BURST, LINE_SECONDS)

    def log(self, now: float, reason: str) -> None:
        """Counts a refused connection, and logs it if the rate allows; it may quote the peer."""
        self.count += 1
        if self._lines.take(now):
            _log.warning("%s", printable(reason))
        else:
            self._unlogged += 1

    def tick(self, now: float) -> None:
        if self._unlogged and self._lines.take(now):
            _log.warning(
                "%d more connections were refused, %d in all: somebody tries again and again",
                self._unlogged,
                self.count,
            )
            self._unlogged = 0


class RefusedHosts:
    """Limits how often one host may be refused, after which its handshakes cost nothing.

    This host itself is never limited: the job's own tasks may have its address.
    """

    def __init__(self, tries: int, seconds: float) -> None:
        self._tries, self._seconds = tries, seconds
        self._hosts: dict[str, TokenBucket] = {}  # the one that was refused last is the last

    def refused(self, now: float, peer: str) -> None:
        host = network(peer)
        if host is None:
            return
        bucket = self._hosts.pop(host, None) or TokenBucket(self._tries, self._seconds)
        bucket.take(now)
        self._hosts[host] = bucket
        if len(self._hosts) > _HOSTS:
            del self._hosts[next(iter(self._hosts))]

    def admits(self, now: float, peer: str) -> bool:
        bucket = self._hosts.get(network(peer) or "")
        return bucket is None or bucket.has(now)


def network(peer: str) -> str | None:
    """Returns what one owner has, an IPv4 address or 64 bits of IPv6; None for this host."""
    host = peer.partition("://")[2].rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None  # a unix socket, or memory
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return None
    return str(address) if address.version == 4 else address.packed[:8].hex()

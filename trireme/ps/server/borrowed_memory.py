"""The memory that workers of a server's host lend to it, where a transport shares memory."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.ps.extra import Extra, bytes_in
from trireme.ps.lending_messages import LendExtra, LendMemory
from trireme.ps.replication.log import Lent
from trireme.wire.service import Link
from trireme.wire.shared_memory import SharedMemory
from trireme.wire.transport import local_memory


class NoMemory:
    """No memory, as of workers on other hosts; the base class of what has some."""

    identities: tuple[int, ...] = ()  # of the memory that is lent

    def add(self, link: Link, message: LendMemory | LendExtra) -> bool:
        """Maps memory that a worker of this host lends; returns False if it cannot be used."""
        return False

    def remove(self, link: Link) -> int | None:
        """Forgets what a worker lent over a connection; returns memory that nobody lends now."""
        return None

    def find(self, memory: int) -> SharedMemory | None:
        """Returns the memory of an identity."""
        return None

    def place_of(self, link: Link, payload: Sequence[memoryview]) -> Lent | None:
        """Returns where a push lies that has come over a connection; None where it was sent."""
        return None

    def received(self, link: Link, extra: Extra) -> Extra:
        """Returns a request's extra values with the bytes at the places that it names."""
        return tuple(bytes_in(extra))

    def answer(self, link: Link, extra: Extra) -> Extra:
        """Returns an answer's, whose bytes lie in the memory that is lent over its connection."""
        return extra


def borrowed_memory() -> NoMemory:
    """Returns what takes the memory that workers lend to one server."""
    local = local_memory()
    borrowed: NoMemory = NoMemory() if local is None else local.borrowed()
    return borrowed

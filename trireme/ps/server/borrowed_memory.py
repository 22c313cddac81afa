"""The memory that workers of this host lend to one server, by identity."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trireme.errors import WireError
from trireme.ps.extra import Extra, LentMemory, bytes_in
from trireme.ps.lending_messages import LendExtra, LendMemory
from trireme.ps.replication.log import Lent
from trireme.wire.service import Link
from trireme.wire.shared_memory import SharedMemory
from trireme.wire.transport import local_memory

_log = logging.getLogger(__name__)


class BorrowedMemory:
    """The memory that workers lend, each to all servers of its host.

    So a primary can name the place of a gradient to a backup, which has mapped the same memory.
    """

    def __init__(self) -> None:
        self._memories: dict[int, SharedMemory] = {}
        self._lent: dict[Link, Lent] = {}

    @property
    def identities(self) -> tuple[int, ...]:
        return tuple(self._memories)

    def add(self, link: Link, message: LendMemory) -> bool:
        """Maps memory that a worker of this host lends; returns False if it cannot be used."""
        memory, local = _attached(link, message.nbytes), local_memory()
        if memory is None or local is None:
            return False
        try:
            outbound, inbound = memory.places(message.outbound), memory.places(message.inbound)
        except WireError as error:
            _warn(link, error)
            return False
        link.connection.lending = local.lend(outbound, inbound, borrowed=True)
        if message.extra:
            link.connection.stream.expect_descriptor()
        self._lent[link] = Lent(memory.identity, message.outbound)
        self._memories.setdefault(memory.identity, memory)
        return True

    def remove(self, link: Link) -> int | None:
        """Forgets what a worker lent over a connection; returns memory that nobody lends now."""
        lent = self._lent.pop(link, None)
        if lent is None or any(lent.memory == other.memory for other in self._lent.values()):
            return None
        del self._memories[lent.memory]
        return lent.memory

    def find(self, memory: int) -> SharedMemory | None:
        return self._memories.get(memory)

    def place_of(self, link: Link, payload: Sequence[memoryview]) -> Lent | None:
        """Returns where a push lies that has come over a connection; None where it was sent."""
        lending = link.connection.lending
        if lending is None or payload is not lending.incoming:
            return None
        return self._lent.get(link)


class BorrowedExtra:
    """The memory that workers lend for extra values: each belongs to one connection."""

    def __init__(self) -> None:
        self._memories: dict[Link, LentMemory] = {}

    def add(self, link: Link, message: LendExtra) -> bool:
        """Maps memory that a worker of this host lends; returns False if it cannot be used."""
        memory = _attached(link, message.nbytes)
        local = local_memory()
        if memory is None or local is None:
            return False
        self._memories[link] = local.lent(memory)
        return True

    def remove(self, link: Link) -> None:
        self._memories.pop(link, None)

    def received(self, link: Link, extra: Extra) -> Extra:
        memory = self._memories.get(link)
        return tuple(bytes_in(extra)) if memory is None else memory.received(extra)

    def answer(self, link: Link, extra: Extra) -> Extra:
        """Returns the part of an answer, whose bytes lie in memory lent over its connection."""
        memory = self._memories.get(link)
        return extra if memory is None else memory.answer(extra)


def _attached(link: Link, nbytes: int) -> SharedMemory | None:
    descriptor, local = link.connection.stream.take_descriptor(), local_memory()
    if descriptor is None or local is None:
        return None
    try:
        memory = local.attach(descriptor, nbytes)
    except WireError as error:
        _warn(link, error)
        return None
    memory.close()  # the mapping stays while a view of it exists
    return memory


def _warn(link: Link, error: WireError) -> None:
    _log.warning("%s lends memory that cannot be used: %s", link.identity.task, error)

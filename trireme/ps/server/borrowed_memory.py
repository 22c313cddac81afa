"""The memory that workers of this host lend to one server, by identity."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trireme.errors import WireError
from trireme.ps.lending_messages import LendRows
from trireme.ps.messages import Pairs
from trireme.ps.replication.log import Lent
from trireme.wire.service import Link
from trireme.wire.shared_memory import SharedMemory
from trireme.wire.transport import local_memory

_log = logging.getLogger(__name__)


class BorrowedMemory:
    """The memory that workers lend, and the places in it that their pushes come from.

    A worker lends one memory to all servers of its host. So a primary can name the place of a
    gradient to a backup, which has mapped the same memory, and need not send it.
    """

    def __init__(self) -> None:
        self._memories: dict[int, SharedMemory] = {}
        self._lent: dict[Link, Lent] = {}

    @property
    def identities(self) -> tuple[int, ...]:
        """The identities of all memory that is mapped."""
        return tuple(self._memories)

    def add(self, link: Link, memory: SharedMemory, places: Pairs) -> bool:
        """Notes that a worker lends memory; returns whether that changes `identities`.

        Args:
            places: the (offset, length) in it that the worker's pushes come from, in bytes.
        """
        self._lent[link] = Lent(memory.identity, places)
        return self._memories.setdefault(memory.identity, memory) is memory

    def remove(self, link: Link) -> int | None:
        """Forgets what a worker lent over a connection; returns the memory that nobody lends now.

        It stays mapped while a gradient that lies in it is used.
        """
        lent = self._lent.pop(link, None)
        if lent is None or any(lent.memory == other.memory for other in self._lent.values()):
            return None
        del self._memories[lent.memory]
        return lent.memory

    def find(self, memory: int) -> SharedMemory | None:
        """Returns the memory of an identity; None where it is not mapped."""
        return self._memories.get(memory)

    def place_of(self, link: Link, payload: Sequence[memoryview]) -> Lent | None:
        """Returns where a push lies that has come over a connection; None where it was sent."""
        lending = link.connection.lending
        if lending is None or payload is not lending.incoming:
            return None
        return self._lent.get(link)


class BorrowedRows:
    """The memory that workers lend for rows: each belongs to one connection."""

    def __init__(self) -> None:
        self._memories: dict[Link, SharedMemory] = {}

    def add(self, link: Link, message: LendRows) -> bool:
        """Maps memory that a worker of this host lends; returns False if it cannot be used."""
        descriptor, local = link.connection.stream.take_descriptor(), local_memory()
        if descriptor is None or local is None:
            return False
        try:
            memory = local.attach(descriptor, message.nbytes)
        except WireError as error:
            _log.warning("%s lends memory that cannot be used: %s", link.identity.task, error)
            return False
        memory.close()  # the mapping stays while a view of it exists
        self._memories[link] = memory
        return True

    def remove(self, link: Link) -> None:
        """Forgets the memory of a connection. It stays mapped while rows in it are used."""
        self._memories.pop(link, None)

    def of(self, link: Link) -> SharedMemory | None:
        """Returns the memory that was lent over a connection; None for none."""
        return self._memories.get(link)

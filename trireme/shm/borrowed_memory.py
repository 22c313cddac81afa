"""The memory that workers of this host lend to one server, by identity."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trireme.errors import WireError
from trireme.ps.extra import Extra, bytes_in
from trireme.ps.lending_messages import LendExtra, LendMemory
from trireme.ps.replication.log import Lent
from trireme.ps.server.borrowed_memory import NoMemory
from trireme.shm.lent_memory import LentMemory
from trireme.shm.memory import Lending, SharedMemory
from trireme.wire.service import Link

_log = logging.getLogger(__name__)
_UNUSABLE = "%s lends memory that cannot be used: %s"


class BorrowedMemory(NoMemory):
    """The memory that workers lend, each to all servers of its host.

    So a primary can name the place of a gradient to a backup, which has mapped the same memory.
    That for extra values belongs to one connection.
    """

    def __init__(self) -> None:
        self._memories: dict[int, SharedMemory] = {}
        self._lent: dict[Link, Lent] = {}
        self._extra: dict[Link, LentMemory] = {}

    @property
    def identities(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self._memories)

    def add(self, link: Link, message: LendMemory | LendExtra) -> bool:
        memory = _attached(link, message.nbytes)
        if memory is None:
            return False
        if isinstance(message, LendExtra):
            self._extra[link] = LentMemory(memory)
            return True
        try:
            outbound, inbound = memory.places(message.outbound), memory.places(message.inbound)
        except WireError as error:
            _log.warning(_UNUSABLE, link.identity.task, error)
            return False
        link.connection.lending = Lending(outbound, inbound, borrowed=True)
        if message.extra:
            link.connection.stream.expect_descriptor()
        self._lent[link] = Lent(memory.identity, message.outbound)
        self._memories.setdefault(memory.identity, memory)
        return True

    def remove(self, link: Link) -> int | None:
        self._extra.pop(link, None)
        lent = self._lent.pop(link, None)
        if lent is None or any(lent.memory == other.memory for other in self._lent.values()):
            return None
        del self._memories[lent.memory]
        return lent.memory

    def find(self, memory: int) -> SharedMemory | None:
        return self._memories.get(memory)

    def place_of(self, link: Link, payload: Sequence[memoryview]) -> Lent | None:
        lending = link.connection.lending
        if lending is None or payload is not lending.incoming:
            return None
        return self._lent.get(link)

    def received(self, link: Link, extra: Extra) -> Extra:
        memory = self._extra.get(link)
        return tuple(bytes_in(extra)) if memory is None else memory.received(extra)

    def answer(self, link: Link, extra: Extra) -> Extra:
        memory = self._extra.get(link)
        return extra if memory is None else memory.answer(extra)


def _attached(link: Link, nbytes: int) -> SharedMemory | None:
    descriptor = link.connection.stream.take_descriptor()
    if descriptor is None:
        return None
    try:
        memory = SharedMemory.attach(descriptor, nbytes)
    except WireError as error:
        _log.warning(_UNUSABLE, link.identity.task, error)
        return None
    memory.close()  # the mapping stays while a view of it exists
    return memory

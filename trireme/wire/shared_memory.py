"""Memory that processes of one host share, as a transport offers it.

A frame whose payload lies in memory that one process lends the other has a flag in its header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

Views = tuple[memoryview, ...]


class Lending(Protocol):
    """The lent memory as one side of a connection uses it."""

    incoming: Views  # the ranges that hold the payload of a flagged frame of the peer
    incoming_bytes: int

    def carry(self, payload: Iterable[Buffer]) -> int:
        """Passes a payload through the memory; returns its bytes, or 0 if it has to cross."""


class SharedMemory(Protocol):
    """Shared memory, mapped into this process."""

    nbytes: int
    identity: int  # tells it from all other such memory of this host; the same in every process
    view: memoryview  # its bytes, writable

    moves: bool  # whether `move` works: not where a device has registered the memory

    def move(self) -> None:
        """Moves the bytes to new memory at the same addresses; other processes keep the old one."""

    def fileno(self) -> int:
        """Returns its descriptor, by which another process gets it."""

    def place_of(self, view: memoryview) -> tuple[int, int]:
        """Returns (offset, length) in bytes of a view of it; raises `ValueError` outside."""

    def places(self, places: Sequence[tuple[int, int]]) -> Views:
        """Returns a view of each range (offset, length); raises `ConnectionBroken` outside."""

    def close(self) -> None:
        """Closes the descriptor. The memory stays mapped as long as a view of it exists."""


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """What a transport between processes of one host has to share memory."""

    available: Callable[[], bool]  # whether this system can
    create: Callable[[int], SharedMemory]  # new memory of zeros; raises `OSError` for lack of it
    lend: Callable[..., Lending]  # makes that of one side; see `trireme.shm.memory.Lending`
    lent: Callable[[SharedMemory], Any]  # makes the `trireme.ps.extra.LentMemory` of a worker
    borrowed: Callable[[], Any]  # makes a server's `trireme.ps.server.borrowed_memory.NoMemory`
    address: Callable[[str], str]  # of the listener beside one at a TCP address of this host

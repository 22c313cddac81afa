"""The bytes that a connection has to send and its stream has not taken yet."""

from __future__ import annotations

from collections import deque
from itertools import islice

__all__ = ["SendQueue"]

_REUSED_BYTES = 1 << 20  # copies of at least this size use one memory, one after the other
_FRONT_PIECES = 64  # how many queued copies are written at once


class SendQueue:
    """Copies of outgoing bytes, in order.

    The memory of the last large copy is kept for the next one: new pages each time would take
    longer than the copy itself.

    Attributes:
        nbytes: how many bytes are queued.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._pieces: deque[memoryview] = deque()
        self._reused = bytearray()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def append(self, views: list[memoryview]) -> None:
        """Adds a copy of the views."""
        size = sum(map(len, views))
        if self._pieces or size < _REUSED_BYTES:
            copy = memoryview(b"".join(views))
        else:  # the reused memory is free, as nothing is queued
            if len(self._reused) < size:
                self._reused = bytearray(size)
            copy = memoryview(self._reused)[:size]
            offset = 0
            for view in views:
                copy[offset : offset + len(view)] = view
                offset += len(view)
        self._pieces.append(copy)
        self.nbytes += size

    def front(self) -> list[memoryview]:
        """Returns the first pieces, to be written together."""
        return list(islice(self._pieces, _FRONT_PIECES))

    def written(self, front: list[memoryview], rest: list[memoryview], count: int) -> None:
        """Removes what was written.

        Args:
            front: the pieces that `front` returned.
            rest: what is left of them.
            count: how many bytes were written.
        """
        self.nbytes -= count
        for _ in range(len(front) - len(rest)):
            self._pieces.popleft()
        if rest:
            self._pieces[0] = rest[0]

    def clear(self) -> None:
        """Drops all pieces."""
        self._pieces.clear()
        self.nbytes = 0

    def free(self) -> None:
        """Drops all pieces and the reused memory."""
        self.clear()
        self._reused = bytearray()

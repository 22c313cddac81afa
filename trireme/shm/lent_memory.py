"""The memory that a worker lends over a connection for extra values, which do not cross it.

It holds those of one request at a time: first what the worker sends, then what the answer brings.
When the connection ends, the worker gives the memory up: so nothing that a server still does for
an old connection meets another request. The system gives pages to it when they are first used.
"""

from __future__ import annotations

from trireme.errors import FrameError, WireError
from trireme.ps.extra import Extra, Place, aligned
from trireme.wire.shared_memory import SharedMemory


class LentMemory:
    """One side's use of the memory; see `trireme.ps.extra.LentMemory`."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._top = 0  # of the request, after which the answer lies

    def space(self, nbytes: int) -> memoryview | None:
        return self._memory.view[:nbytes] if nbytes <= self._memory.nbytes else None

    def sent(self, extra: Extra) -> Extra:
        self._top = max((self._end(each) for each in extra), default=0)
        return self.answer(extra)

    def received(self, extra: Extra) -> Extra:
        self._top = max((e.offset + e.nbytes for e in extra if isinstance(e, Place)), default=0)
        try:
            return tuple(
                self._memory.places([(each.offset, each.nbytes)])[0]  # type: ignore[misc]
                if isinstance(each, Place)
                else each
                for each in extra
            )
        except WireError as error:
            raise FrameError(str(error)) from error

    def answer(self, extra: Extra) -> Extra:
        """Returns an answer with the places of its bytes, which are copied behind the request."""
        size = sum(aligned(_view(each).nbytes) for each in extra if not self._end(each))
        if aligned(self._top) + size > self._memory.nbytes:
            return extra
        return tuple(map(self._placed, extra))

    def _placed(self, each: bytes | Place) -> Place:
        view, end = _view(each), self._end(each)
        if not end:
            offset = aligned(self._top)
            self._top = end = offset + view.nbytes
            self._memory.view[offset:end] = view
        return Place(end - view.nbytes, view.nbytes)

    def _end(self, each: bytes | Place) -> int:
        """Returns where bytes end in this memory; 0 if they lie elsewhere."""
        view = _view(each)
        if view.readonly or not view.nbytes:
            return 0
        try:
            offset, nbytes = self._memory.place_of(view)
        except ValueError:
            return 0
        return offset + nbytes


def _view(each: bytes | Place) -> memoryview:
    if isinstance(each, Place):
        raise FrameError("a message names memory that was not lent over its connection")
    return memoryview(each)

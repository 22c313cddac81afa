"""The memory that a worker lends to one server for rows: keys and rows do not cross the connection.

It belongs to one connection, and holds the rows of one request at a time: first what the worker
sends, then room for the rows that the answer brings. When the connection ends, the worker gives the
memory up: so nothing that a server still does for an old connection meets the rows of another
request. The system gives pages to it when they are first used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from trireme.errors import FrameError, WireError
from trireme.ps.messages import PulledRows, PullRows, Push, PushReply
from trireme.ps.row_messages import Data, Place, RowKeys, RowKeysInto, RowUpdates, data_of
from trireme.ps.table_spec import TableSpec
from trireme.wire.shared_memory import SharedMemory

ROW_BYTES = 1 << 28
"""The size of such memory, of which only what is used takes memory."""

ALIGNMENT = 64
"""Keys and rows begin at multiples of so many bytes."""

Request = Push | PullRows
"""What a worker sends."""

Answer = PushReply | PulledRows
"""What a server answers."""

Answers = tuple[memoryview | None, ...]
"""For each entry of a request's `wanted`, where to write its rows; None for into the answer."""


def aligned(nbytes: int) -> int:
    """Returns a length, rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class RowMemory:
    """The memory at the worker's side."""

    def __init__(self, memory: SharedMemory, tables: Sequence[TableSpec]) -> None:
        self._memory = memory
        self._tables = tables
        self._top = 0  # of what the present request has laid
        self._answers: Answers = ()

    def space(self, nbytes: int) -> memoryview | None:
        """Returns memory for what the next request sends; None if that is more than there is."""
        return self._memory.view[:nbytes] if nbytes <= self._memory.nbytes else None

    def lay(self, request: Request) -> Request:
        """Returns a request that names its keys and rows where they lie in this memory.

        What does not lie there is copied to it. Returns the request as it is if there is no room.
        """
        self._answers = ()
        entries: list[RowUpdates | RowKeys] = [*_updates(request), *request.wanted]
        size = sum(self._size_of(each) for each in entries)
        if not entries or size > self._memory.nbytes:
            return request
        self._top = max((self._end(data) for each in entries for data in _data(each)), default=0)
        changed: dict[str, object] = {"wanted": tuple(map(self._laid_keys, request.wanted))}
        if isinstance(request, Push):
            changed["rows"] = tuple(
                msgspec.structs.replace(
                    each, keys=self._laid(each.keys), rows=self._laid(each.rows)
                )
                for each in request.rows
            )
        return msgspec.structs.replace(request, **changed)

    def answered(self, answer: Answer) -> Answer:
        """Returns an answer with the rows that the server has written to this memory.

        They are there until the next request.
        """
        if None not in answer.rows:
            return answer
        rows = [
            self._answers[place] if data is None and place < len(self._answers) else data
            for place, data in enumerate(answer.rows)
        ]
        if None in rows:
            raise FrameError("a parameter server answered without the rows that were wanted")
        return msgspec.structs.replace(answer, rows=tuple(rows))

    def _laid_keys(self, each: RowKeys) -> RowKeys:
        keys = self._laid(each.keys)
        answer = self._take(self._answer_bytes(each))
        view = self._memory.view[answer.offset : answer.offset + answer.nbytes]
        self._answers = (*self._answers, view)
        return msgspec.structs.replace(each, keys=keys, answer=answer)

    def _laid(self, data: Data) -> Place:
        """Returns the place of keys or rows, which are copied where they lie elsewhere."""
        given = memoryview(data_of(data))
        end = self._end(data)
        if end:
            return Place(end - given.nbytes, given.nbytes)
        place = self._take(given.nbytes)
        self._memory.view[place.offset : place.offset + place.nbytes] = given
        return place

    def _take(self, nbytes: int) -> Place:
        """Takes the next room."""
        offset = aligned(self._top)
        self._top = offset + nbytes
        return Place(offset, nbytes)

    def _end(self, data: Data) -> int:
        """Returns where keys or rows end in this memory; 0 if they lie elsewhere."""
        view = memoryview(data_of(data))
        if view.readonly or not view.nbytes:
            return 0
        try:
            offset, nbytes = self._memory.place_of(view)
        except ValueError:
            return 0
        return offset + nbytes

    def _size_of(self, each: RowUpdates | RowKeys) -> int:
        """Returns the most bytes that an entry takes here."""
        size = sum(ALIGNMENT + aligned(len(data_of(data))) for data in _data(each))
        return size + (aligned(self._answer_bytes(each)) if isinstance(each, RowKeys) else 0)

    def _answer_bytes(self, each: RowKeys) -> int:
        spec = self._tables[each.table]
        return len(data_of(each.keys)) // 8 * spec.width * spec.item_size


def _updates(request: Request) -> Sequence[RowUpdates]:
    return request.rows if isinstance(request, Push) else ()


def _data(each: RowUpdates | RowKeys) -> Iterator[Data]:
    yield each.keys
    if isinstance(each, RowUpdates):
        yield each.rows


# At the server's side ---------------------------------------------------------------------------


def found(memory: SharedMemory | None, request: Request) -> tuple[Request, Answers]:
    """Returns a request with the keys and rows that lie in lent memory, and where its answer goes.

    The rows of a `PullRows` are gathered straight into that memory (`RowKeysInto`). Those of a push
    are written when its answer is sent.

    Args:
        memory: what the worker has lent over the connection; None for nothing.
    """
    rows = _updates(request)
    if not request.wanted and not rows:
        return request, ()
    wanted = tuple(_with(memory, each, "keys") for each in request.wanted)
    answers = tuple(
        None if each.answer is None else _view(memory, each.answer) for each in request.wanted
    )
    if isinstance(request, PullRows):  # these are never entries of a log: written at once
        wanted = tuple(map(_into, wanted, answers))
        return msgspec.structs.replace(request, wanted=wanted), ()
    wanted = tuple(msgspec.structs.replace(each, answer=None) for each in wanted)
    updates = tuple(_with(memory, each, "keys", "rows") for each in rows)
    return msgspec.structs.replace(request, rows=updates, wanted=wanted), answers


def _into(each: RowKeys, answer: memoryview | None) -> RowKeys:
    if answer is None:
        return each
    return RowKeysInto(each.table, each.keys, out=answer)


def written(answer: PushReply, answers: Answers) -> PushReply:
    """Writes the rows of an answer to lent memory; returns what is left to be sent of it."""
    if not answer.rows or not any(answers):
        return answer
    rest: list[bytes | None] = []
    for data, place in zip(answer.rows, answers, strict=False):
        fits = place is not None and data is not None and place.nbytes == len(data)
        if fits and place is not None and data is not None:
            place[:] = data
        rest.append(None if fits else data)
    return msgspec.structs.replace(answer, rows=tuple(rest))


_E = TypeVar("_E", RowUpdates, RowKeys)


def _with(memory: SharedMemory | None, each: _E, *names: str) -> _E:
    """Returns an entry whose fields are at hand."""
    fields = {name: getattr(each, name) for name in names}
    views = {n: _view(memory, data) for n, data in fields.items() if isinstance(data, Place)}
    return msgspec.structs.replace(each, **views) if views else each


def _view(memory: SharedMemory | None, place: Place) -> memoryview:
    if memory is None:
        raise FrameError("a request names rows in lent memory, and none was lent for rows")
    try:
        return memory.places([(place.offset, place.nbytes)])[0]
    except WireError as error:
        raise FrameError(str(error)) from error

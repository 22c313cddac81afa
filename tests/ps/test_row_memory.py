"""Keys and rows that lie in memory that a worker lends over one connection."""

from __future__ import annotations

import itertools
import os
import random

import msgspec
import numpy as np
import pytest

from trireme.errors import FrameError
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import Applied, ParameterSpec, PulledRows, PullRows, Push, PushReply
from trireme.ps.replication.messages import PS_CATALOG
from trireme.ps.row_memory import ALIGNMENT, RowMemory, aligned, found, written
from trireme.ps.row_messages import Place, RowKeys, RowKeysInto, RowUpdates, data_of, owned, raw
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.ps.table_spec import Add, TableSpec
from trireme.shm.memory import SharedMemory, available

pytestmark = pytest.mark.skipif(not available(), reason="needs Linux")

SPECS = (TableSpec("counts", 3, Add(), "int64"), TableSpec("rows", 5, Add(), "float32"))
SIZE = 1 << 16
REPLY = PushReply(Applied(1), 1, 0, False)


class Lent:
    """Memory as a worker and a server have it."""

    def __init__(self, size: int = SIZE) -> None:
        memory = SharedMemory.create(size)
        self.server = SharedMemory.attach(os.dup(memory.fileno()), size)
        self.worker = RowMemory(memory, SPECS)
        self.own = memory

    def sent(self, request: Push | PullRows) -> Push | PullRows:
        """Returns what the server reads: the message goes as bytes."""
        laid = self.worker.lay(request)
        came = PS_CATALOG.decode(laid.kind, PS_CATALOG.encode(laid))
        assert isinstance(came, Push | PullRows)
        return came


def push(*rows: RowUpdates, wanted: tuple[RowKeys, ...] = ()) -> Push:
    return Push(1, 1, 0, 0, 1.0, rows=rows, wanted=wanted)


def updates(table: int, count: int) -> RowUpdates:
    spec = SPECS[table]
    rows = np.arange(count * spec.width, dtype=spec.dtype) + 7 * table
    return RowUpdates(table, raw(np.arange(count) - 3), raw(rows), 0.5)


def same(one: RowUpdates, other: RowUpdates) -> bool:
    return owned([one]) == owned([other])


def test_updates_and_answers_lie_in_the_memory_and_not_in_the_message() -> None:
    lent = Lent()
    rows = updates(0, 20), updates(1, 9)
    wanted = RowKeys(1, raw(np.array([5, 6]))), RowKeys(0, raw(np.array([1])))
    came = lent.sent(push(*rows, wanted=wanted))
    places = [data for each in (*came.rows, *came.wanted) for data in msgspec.structs.astuple(each)]  # type: ignore[union-attr]
    lie = [place for place in places if isinstance(place, Place)]
    assert len(lie) == 2 * 2 + 2 * 2
    assert all(place.offset % ALIGNMENT == 0 for place in lie)
    ends = sorted((place.offset, place.offset + place.nbytes) for place in lie)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    seen, answers = found(lent.server, came)
    assert isinstance(seen, Push)
    assert all(map(same, seen.rows, rows))
    assert [bytes(data_of(each.keys)) for each in seen.wanted] == [
        bytes(data_of(each.keys)) for each in wanted
    ]
    assert all(each.answer is None for each in seen.wanted), "an entry of a log names no place"
    values = bytes(range(2 * 5 * 4)), bytes(3 * 8)
    answer = written(msgspec.structs.replace(REPLY, rows=values), answers)
    assert answer.rows == (None, None)
    back = lent.worker.answered(answer)
    assert tuple(bytes(data) for data in back.rows if data is not None) == values


def test_a_pull_is_gathered_straight_into_the_memory() -> None:
    lent = Lent()
    came = lent.sent(PullRows(1, (RowKeys(0, raw(np.array([4, 9]))),)))
    seen, answers = found(lent.server, came)
    (wanted,) = seen.wanted
    assert isinstance(wanted, RowKeysInto) and not answers
    wanted.out[:] = bytes(range(48))
    (rows,) = lent.worker.answered(PulledRows(1, (None,))).rows
    assert rows is not None and bytes(rows) == bytes(range(48))


def test_what_lies_in_the_memory_already_is_not_moved_however_often_it_is_sent() -> None:
    lent = Lent()
    space = lent.worker.space(2 * aligned(40))
    assert space is not None
    space[:40], space[aligned(40) : aligned(40) + 60] = bytes(range(40)), bytes(60)
    keys, rows = space[:40], space[aligned(40) : aligned(40) + 60]
    request = push(RowUpdates(0, keys, rows), wanted=(RowKeys(1, raw(np.array([8]))),))  # type: ignore[arg-type]
    first, again = lent.sent(request), lent.sent(request)
    assert isinstance(first, Push) and first == again
    assert first.rows[0].keys == Place(0, 40)
    assert first.rows[0].rows == Place(aligned(40), 60)


def test_a_request_goes_over_another_connection_with_the_same_rows() -> None:
    """After a connection has broken, the memory of the next one is another."""
    one, other = Lent(), Lent()
    space = one.worker.space(24)
    assert space is not None
    space[:] = bytes(range(24))
    request = push(RowUpdates(0, raw(np.array([3])), space))  # type: ignore[arg-type]
    one.sent(request)
    seen, _ = found(other.server, other.sent(request))
    assert isinstance(seen, Push) and bytes(data_of(seen.rows[0].rows)) == bytes(range(24))


def test_what_does_not_fit_goes_in_the_message() -> None:
    lent = Lent(4096)
    request = push(updates(0, 200))
    assert lent.worker.lay(request) is request
    assert lent.worker.space(4097) is None
    assert found(lent.server, request) == (request, (None,) * 0)


@pytest.mark.parametrize("place", [Place(SIZE, 8), Place(SIZE - 8, 16), Place(1 << 62, 1 << 62)])
def test_places_outside_the_memory_are_refused(place: Place) -> None:
    lent = Lent()
    for request in (
        push(RowUpdates(0, place, b"")),
        push(RowUpdates(0, b"", place)),
        push(wanted=(RowKeys(0, place),)),
        push(wanted=(RowKeys(0, b"", place),)),
        PullRows(1, (RowKeys(0, b"", place),)),
    ):
        with pytest.raises(FrameError, match="the peer names"):
            found(lent.server, request)
        with pytest.raises(FrameError, match="none was lent for rows"):
            found(None, request)


def test_what_a_shard_keeps_of_a_worker_that_is_out_is_its_own() -> None:
    """The worker goes on, and other rows come to where its last ones lie."""
    lent = bytearray(raw(np.arange(6.0)))
    sent = push(RowUpdates(0, raw(np.array([1, 2])), memoryview(lent)))  # type: ignore[arg-type]
    layout = Layout.of([ParameterSpec("w", (1,), "float32", 0)], servers=1)
    pending = Pending(Participant(0, 1), sent, None, PartBuffer(layout, 0), 0.0)
    kept = pending.kept()
    lent[:] = bytes(len(lent))
    assert kept.answered
    assert np.frombuffer(data_of(kept.push.rows[0].rows)).tolist() == list(range(6))


def test_an_answer_without_rows_is_refused() -> None:
    worker = Lent().worker
    with pytest.raises(FrameError, match="answered without the rows that were wanted"):
        worker.answered(PulledRows(1, (None,)))


def test_damaged_requests_are_read_or_refused_by_one_error() -> None:
    """Any byte of a request may be another one: nothing outside the memory is touched."""
    lent, random_ = Lent(), random.Random(0)
    request = push(updates(0, 4), updates(1, 2), wanted=(RowKeys(1, raw(np.array([2]))),))
    metadata = PS_CATALOG.encode(lent.worker.lay(request))
    refused = 0
    for _ in range(3000):
        damaged = bytearray(metadata)
        for _ in range(random_.randint(1, 3)):
            damaged[random_.randrange(len(damaged))] = random_.randrange(256)
        try:
            came = PS_CATALOG.decode(Push.kind, damaged)
            assert isinstance(came, Push)
            seen, answers = found(lent.server, came)
            for each in seen.rows:  # type: ignore[union-attr]
                bytes(data_of(each.keys)), bytes(data_of(each.rows))
            written(msgspec.structs.replace(REPLY, rows=(bytes(20),)), answers)
        except FrameError:
            refused += 1
    assert 1000 < refused < 3000

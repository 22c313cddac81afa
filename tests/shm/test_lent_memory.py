"""Extra values that lie in memory that a worker lends over one connection."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from trireme.errors import FrameError
from trireme.ps.extra import ALIGNMENT, Extra, Place, aligned, bytes_in
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import ParameterSpec, Push
from trireme.ps.replication.messages import PS_CATALOG
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending
from trireme.shm import memory as memories
from trireme.shm.lent_memory import LentMemory

pytestmark = pytest.mark.skipif(not memories.available(), reason="needs Linux")

SIZE = 1 << 16
REQUEST = (b"header", bytes(range(200)), b"", b"x" * 65)


class Lent:
    """Memory as a worker and a server have it."""

    def __init__(self, size: int = SIZE) -> None:
        memory = memories.SharedMemory.create(size)
        other = memories.SharedMemory.attach(os.dup(memory.fileno()), size)
        self.worker, self.server = LentMemory(memory), LentMemory(other)

    def sent(self, extra: Extra) -> Extra:
        """Returns what the server reads: the message goes as bytes."""
        message = Push(1, 1, 0, 0, 1.0, extra=self.worker.sent(extra))
        came = PS_CATALOG.decode(Push.kind, PS_CATALOG.encode(message))
        assert isinstance(came, Push)
        return came.extra


def test_requests_and_answers_lie_in_the_memory_and_not_in_the_message() -> None:
    lent = Lent()
    came = lent.sent(REQUEST)
    places = [each for each in came if isinstance(each, Place)]
    assert len(places) == len(REQUEST)
    assert all(place.offset % ALIGNMENT == 0 for place in places)
    ends = sorted((place.offset, place.offset + place.nbytes) for place in places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    seen = lent.server.received(came)
    assert tuple(map(bytes, bytes_in(seen))) == REQUEST
    values = bytes(range(40)), bytes(24)
    answer = lent.server.answer(values)
    assert all(isinstance(each, Place) for each in answer)
    assert tuple(map(bytes, bytes_in(lent.worker.received(answer)))) == values
    assert tuple(map(bytes, bytes_in(seen))) == REQUEST, "an answer does not lie where it lies"


def test_what_lies_in_the_memory_already_is_not_moved_however_often_it_is_sent() -> None:
    lent = Lent()
    space = lent.worker.space(2 * aligned(40))
    assert space is not None
    space[:40] = bytes(range(40))
    request = b"header", space[:40], space[aligned(40) : aligned(40) + 60]
    first, again = lent.sent(request), lent.sent(request)  # type: ignore[arg-type]
    assert first == again
    assert first[1:] == (Place(0, 40), Place(aligned(40), 60))


def test_a_request_goes_over_another_connection_with_the_same_values() -> None:
    """After a connection has broken, the memory of the next one is another."""
    one, other = Lent(), Lent()
    space = one.worker.space(24)
    assert space is not None
    space[:] = bytes(range(24))
    one.sent((space,))  # type: ignore[arg-type]
    (seen,) = bytes_in(other.server.received(other.sent((space,))))  # type: ignore[arg-type]
    assert bytes(seen) == bytes(range(24))


def test_what_does_not_fit_goes_in_the_message() -> None:
    lent = Lent(4096)
    request = (bytes(4000), bytes(200))
    assert lent.worker.sent(request) == request
    assert lent.worker.space(4097) is None
    assert lent.server.received(request) == request
    assert lent.server.answer(request) == request


@pytest.mark.parametrize("place", [Place(SIZE, 8), Place(SIZE - 8, 16), Place(1 << 62, 1 << 62)])
def test_places_outside_the_memory_are_refused(place: Place) -> None:
    with pytest.raises(FrameError, match="the peer names"):
        Lent().server.received((b"", place))
    with pytest.raises(FrameError, match="was not lent over its connection"):
        bytes_in((b"", place))


def test_what_a_shard_keeps_of_a_worker_that_is_out_is_its_own() -> None:
    """The worker goes on, and other values come to where its last ones lie."""
    lent = bytearray(b"before")
    sent = Push(1, 1, 0, 0, 1.0, extra=(memoryview(lent),))  # type: ignore[arg-type]
    layout = Layout.of([ParameterSpec("w", (1,), "float32", 0)], servers=1)
    kept = Pending(Participant(0, 1), sent, None, PartBuffer(layout, 0), 0.0).kept()
    lent[:] = b"after "
    assert kept.answered
    assert kept.push.extra == (b"before",)


def test_damaged_requests_are_read_or_refused_by_one_error() -> None:
    """Any byte of a request may be another one: nothing outside the memory is touched."""
    lent, random_ = Lent(), random.Random(0)
    metadata = PS_CATALOG.encode(Push(1, 1, 0, 0, 1.0, extra=lent.worker.sent(REQUEST)))
    refused = 0
    for _ in range(3000):
        damaged = bytearray(metadata)
        for _ in range(random_.randint(1, 3)):
            damaged[random_.randrange(len(damaged))] = random_.randrange(256)
        try:
            came = PS_CATALOG.decode(Push.kind, damaged)
            assert isinstance(came, Push)
            for each in bytes_in(lent.server.received(came.extra)):
                bytes(each)
            lent.server.answer((bytes(20),))
        except FrameError:
            refused += 1
    assert 500 < refused < 3000

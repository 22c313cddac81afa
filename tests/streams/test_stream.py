"""Streams are read by position."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.sources import Flow, Sharded
from trireme.data.loading import Loading
from trireme.errors import DataError
from trireme.streams.stream import Stream


def numbers(examples: list[Any]) -> list[int]:
    return [int(inputs[0]) for inputs, _ in examples]


def stream_of(dataset: Any, shards: int = 1, **options: Any) -> Stream:
    return Stream(dataset, shards, loading=Loading(), **options)


def test_positions_are_read_in_any_order() -> None:
    stream = stream_of(Flow(50))
    for start, stop in ((10, 14), (20, 25), (3, 8), (25, 26), (0, 2)):
        found, end = stream.take(start, stop)
        assert (numbers(found), end) == (list(range(start, stop)), None)
    assert numbers(stream.take(48, 60)[0]) == [48, 49]
    assert stream.take(48, 60)[1] == stream.take(70, 80)[1] == 50
    again, _ = stream.take(stream.size, stream.size + 2)
    assert numbers(again) == [0, 1], "the next epoch"


def test_an_end_is_found_by_who_begins_behind_it() -> None:
    assert stream_of(Flow(50)).take(70, 80) == ([], 50)


def test_reading_ahead_reads_nothing_twice() -> None:
    flow = Flow(20)
    stream = stream_of(flow)
    assert stream.look_ahead(0, 8) is None
    assert numbers(stream.take(4, 8)[0]) == [4, 5, 6, 7]
    assert stream.look_ahead(8, 16) == 20
    assert numbers(stream.take(16, 24)[0]) == [16, 17, 18, 19]
    assert flow.read == 20


def test_shards_are_parts_of_an_epoch() -> None:
    stream = stream_of(Sharded(18), 4)
    found = [number for part in range(4) for number in numbers(_all(stream, part))]
    assert found == list(range(18)) and _all(stream, 3) == []
    assert stream.epoch(4 * stream.size) == 1
    mixed = stream_of(Sharded(18), 4, shuffle=True, seed=1)
    orders = [[numbers(_all(mixed, part)) for part in range(e * 4, e * 4 + 4)] for e in range(3)]
    assert all(sorted(n for part in each for n in part) == list(range(18)) for each in orders)
    assert orders[0] != orders[1] or orders[1] != orders[2]


def _all(stream: Stream, part: int) -> list[Any]:
    return stream.take(part * stream.size, part * stream.size + 100)[0]


def test_a_data_set_without_examples_says_so() -> None:
    with pytest.raises(DataError, match="Flow has no examples"):
        stream_of(Flow(0)).take(0, 4)


def test_a_process_reads_ahead() -> None:
    stream = Stream(Flow(30), 1, loading=Loading(num_workers=1))
    assert numbers(stream.take(10, 14)[0]) == [10, 11, 12, 13]
    stream.close()

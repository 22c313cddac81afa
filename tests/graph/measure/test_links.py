"""The links between processes are measured, and all of them agree on the result."""

from __future__ import annotations

import time

from tests.graph.standing_group import standing_group
from trireme.graph.measure.links import bandwidth, measure_links
from trireme.graph.place.costs import Link


def measured(rank: int, ranks: list[int]) -> tuple[dict[tuple[int, int], Link], float]:
    del rank
    began = time.perf_counter()
    links = dict(measure_links(ranks))
    return links, time.perf_counter() - began


def test_processes_of_one_machine() -> None:
    with standing_group(2) as group:
        group(measured, [0, 1])  # the connection is made
        (one, seconds), (other, _) = group(measured, [1, 0])
    assert one == other
    assert list(one) == [(0, 1)]
    assert 1e-6 < one[0, 1].latency_seconds < 0.1
    assert 1e6 < one[0, 1].bytes_per_second < 1e12
    assert 1e-6 < one[0, 1].work_seconds < 0.1
    assert 0 <= one[0, 1].work_byte_seconds < 1e-6
    assert seconds < 3.0


def test_a_bandwidth_is_finite_however_late_small_messages_are() -> None:
    assert bandwidth(1000, 0.5, 1.0) == 2000.0
    assert bandwidth(1000, 1.0, 1.0) == bandwidth(1000, 2.0, 1.0) == 1e5

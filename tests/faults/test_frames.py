"""Frames that come twice, late, in another order or in part: updates count once all the same.

What the real servers and clients make of it is counted as in `test_cut_connections`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults import Proxies, Proxy
from tests.faults.frames import (
    Break,
    Frame,
    Late,
    Repeated,
    Splitter,
    Swapped,
    Treatment,
    Truncated,
    Untouched,
)
from tests.harness import Cluster, run_job
from tests.integration.test_cut_connections import count, each_counts_once, session_for
from trireme.ps.messages import Pull, Push, PushReply
from trireme.wire.message import HEADER_SIZE, pack_header

STEPS = 40


def frame(kind: int, sequence: int, payload: bytes = b"") -> bytes:
    return pack_header(kind, 2, len(payload), sequence) + b"mm" + payload


def numbered(*numbers: int, kind: int = 1) -> list[Frame]:
    return [Frame(kind, number, bytes([number])) for number in numbers]


def passed(treatment: Treatment, frames: list[Frame]) -> list[int]:
    return [raw[0] for each in frames for raw in treatment.treat(each)]


def test_a_stream_is_split_into_frames_wherever_it_is_cut() -> None:
    raw = frame(66, 7, b"payload") + frame(67, 8) + frame(66, 9, b"more")[:-1]
    for size in (1, 3, HEADER_SIZE, len(raw)):
        splitter = Splitter()
        pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
        found = [each for piece in pieces for each in splitter.feed(piece)]
        assert [(each.kind, each.sequence) for each in found] == [(66, 7), (67, 8)]
        assert found[0].raw == frame(66, 7, b"payload")


def test_treatments() -> None:
    assert passed(Untouched([1]), numbered(1, 2)) == [1, 2]
    assert passed(Repeated([1]), numbered(1, 2)) == [1, 1, 2, 2]
    assert passed(Repeated([2]), numbered(1, 2)) == [1, 2]
    assert passed(Late([1]), numbered(1, 2, 3, 4, 5)) == [1, 2, 3, 1, 4, 2, 5]
    swapped = Swapped([1])
    assert passed(swapped, numbered(1, kind=1)) == []
    assert passed(swapped, numbered(2, kind=2)) == [2, 1]
    assert passed(swapped, numbered(3, kind=1)) == []
    assert swapped.idle() == [b"\x03"] and swapped.idle() == []
    with pytest.raises(Break) as broken:
        Truncated([1], keep=3).treat(Frame(1, 1, b"abcdef"))
    assert broken.value.passed == b"abc"


def test_chance_is_drawn_from_the_seed() -> None:
    def touched(seed: int) -> list[int]:
        return passed(Repeated([1], seed, chance=0.5), numbered(*range(50)))

    assert touched(1) == touched(1) != touched(2)
    assert 55 < len(touched(1)) < 95


UP: dict[str, Callable[[int], Treatment]] = {
    "requests twice": lambda seed: Repeated([Push.kind, Pull.kind], seed, 0.5),
    "requests again, late": lambda seed: Late([Push.kind], seed, 0.5),
    "requests held": lambda seed: Swapped([Push.kind], seed, 0.2),
}
DOWN: dict[str, Callable[[int], Treatment]] = {
    "answers twice": lambda seed: Repeated([PushReply.kind], seed, 0.5),
    "answers again, late": lambda seed: Late([PushReply.kind], seed, 0.5),
}
MODES = {"async": Cluster(2, 2, "async", scheme="tcp"), "sync": Cluster(2, 2, "sync", scheme="tcp")}


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", MODES.values(), ids=MODES)
@pytest.mark.parametrize("fault", [*UP, *DOWN])
def test_every_update_counts_once(cluster: Cluster, fault: str) -> None:
    made: list[Untouched] = []

    def prepare(proxy: Proxy) -> None:
        way, treatment = (proxy.up, UP[fault]) if fault in UP else (proxy.down, DOWN[fault])

        def make() -> Treatment:
            made.append(treatment(len(made)))  # type: ignore[arg-type]
            return made[-1]

        way.treatment = make

    with Proxies(prepare=prepare):
        counts = run_job(cluster, lambda _: session_for(cluster, STEPS), count).values
    assert sum(each.touched for each in made) > 10
    each_counts_once(cluster, STEPS, counts)


@pytest.mark.parametrize("keep", [1, HEADER_SIZE, HEADER_SIZE + 5, -1])
def test_a_push_that_breaks_off_is_not_applied_and_is_sent_again(keep: int) -> None:
    """The first push of each of the first connections breaks after so many of its bytes."""
    cluster, broken = Cluster(2, 1, "async", scheme="tcp"), []

    def make() -> Treatment:
        if len(broken) < 4:
            broken.append(Truncated([Push.kind], keep))
            return broken[-1]
        return Untouched([])

    def prepare(proxy: Proxy) -> None:
        proxy.up.treatment = make

    with Proxies(prepare=prepare) as proxies:
        counts = run_job(cluster, lambda _: session_for(cluster, STEPS), count).values
        assert 1 <= proxies.cuts <= len(broken) == 4  # a connection may bring no push
    each_counts_once(cluster, STEPS, counts)

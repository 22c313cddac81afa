"""The ends of epochs in the ledger: short, left out, or found on the way."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.data.ledger import MOST_POSITIONS, EpochEnd, Ledger, parts_of

Span = tuple[int, int]


def ledger_of(size: int, *workers: int, interleave: bool = True) -> Ledger:
    ledger = Ledger(size, interleave=interleave)
    ledger.members(workers)
    return ledger


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 9),
    workers=st.integers(1, 4),
    drop=st.booleans(),
    began=st.integers(0, 60),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_rounds_hold_what_one_process_would_have_taken(
    size: int, batch: int, workers: int, drop: bool, began: int, seed: int
) -> None:
    end = EpochEnd.DROP if drop else EpochEnd.SHORT
    together = batch * workers
    ledger = ledger_of(size, *range(workers))
    ledger.restore([(0, began)] if began else [])
    if drop and size < together:
        with pytest.raises(ValueError, match="would be left out"):
            ledger.lease(0, batch, 1, end)
        return
    until = (began // size + 3) * size
    dealt: dict[int, list[Span]] = {}
    for worker in random.Random(seed).sample(range(workers), workers):
        dealt[worker] = ledger.lease(worker, batch, 1000, end, until)
    expected: list[Span] = []  # of one process, whose batches are the rounds
    start = began
    while start < until:
        stop = min(start + together, (start // size + 1) * size)
        if not drop or stop - start == together:
            expected.append((start, stop))
        start = stop
    assert {len(spans) for spans in dealt.values()} == {len(expected)}
    for number, (low, high) in enumerate(expected):
        found = [dealt[worker][number] for worker in range(workers)]
        assert [p for span in found for p in range(*span)] == list(range(low, high))
    assert not ledger.finished(until) or not expected
    ledger.finish([(w, *span) for w, spans in dealt.items() for span in spans])
    assert ledger.finished(until) and ledger.epoch() == until // size


@given(
    size=st.integers(1, 30),
    batch=st.integers(1, 9),
    until=st.integers(1, 4),
    seed=st.integers(0, 999),
    drop=st.booleans(),
)
@settings(deadline=None)
def test_whatever_comes_back_each_position_is_finished_once(
    size: int, batch: int, until: int, seed: int, drop: bool
) -> None:
    end = EpochEnd.DROP if drop and batch <= size else EpochEnd.SHORT
    ledger, chance, done = ledger_of(size, 0, 1, interleave=False), random.Random(seed), Counter()
    for _ in range(10_000):
        if ledger.finished(until * size):
            break
        worker = chance.randrange(2)
        spans = ledger.lease(worker, batch, chance.randint(1, 3), end, until * size)
        assert all(start // size == (stop - 1) // size for start, stop in spans)
        if chance.random() < 0.3:
            ledger.release(worker)
            continue
        ledger.finish([(worker, *span) for span in spans])
        done.update(p for span in spans for p in range(*span))
    kept = size // batch * batch if end == EpochEnd.DROP else size
    assert set(done.values()) <= {1}
    if end == EpochEnd.SHORT:
        assert sorted(done) == list(range(until * size))
    assert len(done) >= until * kept - until * batch * drop
    assert ledger.lease(0, batch, 1, end, until * size) == []


def test_the_end_of_a_stream_is_found_and_agreed_on() -> None:
    size = MOST_POSITIONS - 1
    ledger = ledger_of(size, 0, 1, interleave=False)
    assert ledger.lease(0, 4, 2, EpochEnd.SHORT) == [(0, 4), (4, 8)]
    assert ledger.lease(1, 4, 2, EpochEnd.SHORT) == [(8, 12), (12, 16)]
    ledger.lack(1, 10, size)
    ledger.lack(0, 10, size)  # another worker finds it too
    assert ledger.lease(0, 4, 1, EpochEnd.SHORT, size) == []
    assert not ledger.finished(size), "worker 1 has not finished"
    ledger.finish([(0, 0, 8), (1, 8, 10)])
    assert ledger.finished(size) and ledger.epoch() == 1
    assert ledger.lease(0, 4, 1, EpochEnd.SHORT) == [(size, size + 4)]
    with pytest.raises(ValueError, match="ends after 9 examples for worker 0"):
        ledger.lack(0, 9, size)
    again = Ledger.resumed(ledger.export())
    with pytest.raises(ValueError, match="ends after 11 examples for worker 1"):
        again.lack(1, 11, size)


def test_an_end_before_examples_that_were_used_is_refused() -> None:
    size = MOST_POSITIONS - 1
    ledger = ledger_of(size, 0, 1, interleave=False)
    ledger.lease(0, 10, 1, EpochEnd.SHORT)
    ledger.finish([(0, 0, 10)])
    with pytest.raises(ValueError, match="the same examples in the same order"):
        ledger.lack(1, 5, size)


def test_whole_parts_are_dealt_and_their_rest_comes_back() -> None:
    size = MOST_POSITIONS - 3
    ledger = ledger_of(size, 0, 1)  # synchronous: parts are not interleaved
    assert ledger.lease(0, MOST_POSITIONS, 1, EpochEnd.SHORT) == [(0, size)]
    assert ledger.lease(1, MOST_POSITIONS, 1, EpochEnd.SHORT) == [(size, 2 * size)]
    ledger.finish([(0, 0, 7)])
    ledger.members([1])
    assert ledger.lease(1, MOST_POSITIONS, 1, EpochEnd.SHORT) == [(7, size)]
    assert parts_of(size) == 3 and parts_of(100) == 1


def test_loops_of_other_kinds_are_refused_in_a_synchronous_job() -> None:
    ledger = ledger_of(10, 0, 1)
    ledger.lease(0, 4, 1, EpochEnd.SHORT)
    with pytest.raises(ValueError, match="worker 1 asks for epochs that end by CROSS"):
        ledger.lease(1, 4, 1)

"""The ledger: each position dealt once unless it came back, whatever workers do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trireme.data.ledger import Ledger

BATCH = 4
Span = tuple[int, int]


def positions(spans: list[Span]) -> list[int]:
    return [position for start, stop in spans for position in range(start, stop)]


class LedgerMachine(RuleBasedStateMachine):
    """Workers lease, finish, give back, are lost, restart; the model is one dict of holders."""

    interleave = False

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(10, interleave=self.interleave)
        self.ledger.members([0, 1, 2])
        self.members = {0, 1, 2}
        self.holder: dict[int, int] = {}
        self.done: set[int] = set()

    def some_worker(self, choice: int) -> int:
        return sorted(self.members)[choice % len(self.members)]

    def some_held(self, worker: int, choice: int, length: int) -> Span:
        held = sorted(p for p, who in self.holder.items() if who == worker)
        start = held[choice % len(held)] if held else choice
        return start, start + length

    @precondition(lambda self: self.members)
    @rule(choice=st.integers(0, 9), count=st.integers(1, 3))
    def lease(self, choice: int, count: int) -> None:
        worker = self.some_worker(choice)
        spans = self.ledger.lease(worker, BATCH, count)
        assert len(spans) == count
        assert all(0 < stop - start <= BATCH for start, stop in spans)
        for position in positions(spans):
            assert position not in self.holder, "held by another"
            assert position not in self.done, "dealt though finished"
            self.holder[position] = worker

    @precondition(lambda self: self.members)
    @rule(choice=st.integers(0, 9), at=st.integers(0, 60), length=st.integers(1, 6))
    def finish_held(self, choice: int, at: int, length: int) -> None:
        worker = self.some_worker(choice)
        span = self.some_held(worker, at, length)
        mine = [p for p in range(*span) if self.holder.get(p) == worker]
        for position in mine:
            # Twice: an acknowledgement may be repeated.
            self.ledger.finish([(worker, position, position + 1)])
            self.ledger.finish([(worker, position, position + 1)])
            del self.holder[position]
            self.done.add(position)

    @precondition(lambda self: self.members)
    @rule(said=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=4))
    def finish_many(self, said: list[tuple[int, int]]) -> None:
        """Of several workers at once, some of it twice."""
        finished: list[tuple[int, int, int]] = []
        for choice, at in said:
            worker = self.some_worker(choice)
            start, _ = self.some_held(worker, at, 1)
            stop = start
            while self.holder.get(stop) == worker and stop < start + BATCH:
                stop += 1
            finished.append((worker, start, stop))
        self.ledger.finish(finished)
        for _, start, stop in finished:
            self.done.update(range(start, stop))
            for position in range(start, stop):
                self.holder.pop(position, None)

    @rule(worker=st.integers(0, 5), at=st.integers(0, 80), length=st.integers(1, 6))
    def finish_what_nobody_holds(self, worker: int, at: int, length: int) -> None:
        """An update of a lost worker, or from before a rollback, turns out to have counted."""
        free = [p for p in range(at, at + length) if p not in self.holder]
        for position in free:
            self.ledger.finish([(worker, position, position + 1)])
            self.done.add(position)

    @rule(worker=st.integers(0, 5), at=st.integers(0, 80), length=st.integers(1, 9))
    def give_back(self, worker: int, at: int, length: int) -> None:
        start, stop = self.some_held(worker, at, length)
        self.ledger.give_back(worker, start, stop)
        for position in range(start, stop):
            if self.holder.get(position) == worker:
                del self.holder[position]

    @rule(worker=st.integers(0, 5))
    def restart_worker(self, worker: int) -> None:
        self.ledger.release(worker)
        self.holder = {p: who for p, who in self.holder.items() if who != worker}

    @rule(members=st.sets(st.integers(0, 5), max_size=4))
    def change_members(self, members: set[int]) -> None:
        self.ledger.members(list(members))
        self.members = members
        self.holder = {p: who for p, who in self.holder.items() if who in members}

    @rule()
    def resume_from_checkpoint(self) -> None:
        consumed = self.ledger.consumed
        self.ledger = Ledger(10, interleave=self.interleave)
        self.ledger.members(list(self.members))
        self.ledger.restore(consumed)
        self.holder = {}
        assert self.ledger.consumed == consumed

    @invariant()
    def knows_what_is_done(self) -> None:
        assert positions(list(self.ledger.consumed)) == sorted(self.done)
        assert self.ledger.workers == tuple(sorted(self.members))

    def teardown(self) -> None:
        """Nothing was lost: one worker alone gets all the rest, without a hole."""
        self.ledger.members([9])
        end = max([*self.done, *self.holder, 40]) + 1
        seen: set[int] = set(self.done)
        while not set(range(end)) <= seen:
            dealt = positions(self.ledger.lease(9, BATCH, 1))
            assert seen.isdisjoint(dealt)
            assert min(dealt) < end, f"missing: {sorted(set(range(end)) - seen)}"
            seen.update(dealt)


class InterleavedMachine(LedgerMachine):
    interleave = True


TestFirstCome = LedgerMachine.TestCase
TestInterleaved = InterleavedMachine.TestCase
TestFirstCome.settings = settings(stateful_step_count=30, deadline=None)
TestInterleaved.settings = settings(stateful_step_count=30, deadline=None)


@given(
    members=st.sets(st.integers(0, 20), min_size=1, max_size=5),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
)
def test_interleaved_spans_do_not_depend_on_who_asks_first(
    members: set[int], counts: list[int], seed: int
) -> None:
    workers = sorted(members)
    ledger = Ledger(1000, interleave=True)
    ledger.members(workers)
    asks = [(worker, count) for worker in workers for count in counts]
    random.Random(seed).shuffle(asks)
    dealt: dict[int, list[Span]] = {worker: [] for worker in workers}
    for worker, count in asks:
        dealt[worker] += ledger.lease(worker, 5, count)
    for i, worker in enumerate(workers):
        starts = [(j * len(workers) + i) * 5 for j in range(sum(counts))]
        assert dealt[worker] == [(start, start + 5) for start in starts]


def test_first_come_first_served() -> None:
    ledger = Ledger(100, interleave=False)
    ledger.members([0, 1])
    assert ledger.lease(1, 4, 2) == [(0, 4), (4, 8)]
    assert ledger.lease(0, 6, 1) == [(8, 14)]
    ledger.give_back(1, 4, 8)
    assert ledger.lease(0, 3, 3) == [(4, 7), (7, 8), (14, 17)]
    assert ledger.consumed == ()


def test_restored_deals_the_holes_then_goes_on() -> None:
    ledger = Ledger(100, interleave=False)
    ledger.members([0])
    ledger.restore([(0, 10), (14, 20), (26, 30)])
    assert ledger.lease(0, 4, 5) == [(10, 14), (20, 24), (24, 26), (30, 34), (34, 38)]


def test_restored_interleaved_goes_on_exactly() -> None:
    ledger = Ledger(100, interleave=True)
    ledger.members([0, 1])
    ledger.lease(0, 4, 3)
    ledger.restore([(0, 70)])
    assert ledger.lease(1, 5, 2) == [(75, 80), (85, 90)]
    assert ledger.lease(0, 5, 1) == [(70, 75)]


def test_a_lost_member_returns_what_it_held_and_what_it_had_not_asked_for() -> None:
    ledger = Ledger(100, interleave=True)
    ledger.members([0, 1])
    assert ledger.lease(0, 4, 3) == [(0, 4), (8, 12), (16, 20)]
    assert ledger.lease(1, 4, 1) == [(4, 8)]
    ledger.members([0])
    # (4, 8) was held by the lost one; (12, 16) was its next; 20 is behind everything dealt.
    assert ledger.lease(0, 4, 3) == [(4, 8), (12, 16), (20, 24)]


def test_the_same_members_again_change_nothing() -> None:
    ledger = Ledger(100, interleave=True)
    ledger.members([1, 0])
    ledger.lease(0, 4, 2)
    ledger.members([0, 1])
    assert ledger.lease(1, 4, 1) == [(4, 8)]
    assert ledger.lease(0, 4, 1) == [(16, 20)]


def test_a_finished_span_that_was_dealt_again_counts_once() -> None:
    ledger = Ledger(100, interleave=False)
    ledger.members([0, 1])
    ledger.lease(0, 4, 1)
    ledger.members([1])
    assert ledger.lease(1, 4, 1) == [(0, 4)]
    ledger.finish([(0, 0, 4)])
    ledger.finish([(1, 0, 4)])
    assert ledger.consumed == ((0, 4),)
    assert ledger.lease(1, 4, 1) == [(4, 8)]


def test_what_came_back_but_was_finished_by_another_is_not_dealt_again() -> None:
    ledger = Ledger(100, interleave=False)
    ledger.members([0, 1])
    ledger.lease(0, 4, 1)
    ledger.finish([(1, 1, 3)])
    ledger.give_back(0, 0, 4)
    assert ledger.lease(1, 4, 3) == [(0, 1), (3, 4), (4, 8)]


def test_unequal_batches_are_refused_when_interleaved() -> None:
    ledger = Ledger(100, interleave=True)
    ledger.members([0, 1])
    ledger.lease(0, 4, 1)
    with pytest.raises(ValueError, match=r"worker 1 asks for batches of 5, worker 0 for .* of 4"):
        ledger.lease(1, 5, 1)


def test_what_makes_no_sense_is_refused() -> None:
    ledger = Ledger(100, interleave=False)
    ledger.members([0, 2])
    with pytest.raises(ValueError, match=r"worker 1 takes no part: the members are \(0, 2\)"):
        ledger.lease(1, 4, 1)
    with pytest.raises(ValueError, match="cannot deal 0 spans"):
        ledger.lease(0, 4, 0)
    with pytest.raises(ValueError, match="0 examples"):
        Ledger(0, interleave=False)

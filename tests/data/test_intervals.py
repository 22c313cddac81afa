"""IntervalSet against a plain set of integers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.data.intervals import IntervalSet, joined

NUMBERS = st.integers(-5, 40)
RANGES = st.tuples(NUMBERS, st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1]))
OPERATIONS = st.lists(st.tuples(st.booleans(), RANGES), max_size=30)


def build(operations: list[tuple[bool, tuple[int, int]]]) -> tuple[IntervalSet, set[int]]:
    intervals, model = IntervalSet(), set[int]()
    for adds, (start, stop) in operations:
        numbers = set(range(start, stop))
        if adds:
            intervals.add(start, stop)
            model |= numbers
        else:
            intervals.remove(start, stop)
            model -= numbers
    return intervals, model


def members(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [number for start, stop in ranges for number in range(start, stop)]


@given(OPERATIONS)
def test_holds_what_a_set_holds(operations: list[tuple[bool, tuple[int, int]]]) -> None:
    intervals, model = build(operations)
    ranges = list(intervals)
    assert members(ranges) == sorted(model)
    assert bool(intervals) == bool(model)
    assert intervals.end == (max(model) + 1 if model else 0)
    numbers = range(-8, 60)
    assert {number for number in numbers if intervals.meets(number, number + 1)} == model
    assert list(IntervalSet(reversed(ranges))) == ranges
    # Sorted, not empty, neither overlapping nor touching.
    bounds = [bound for pair in ranges for bound in pair]
    assert bounds == sorted(set(bounds))


@given(OPERATIONS, RANGES)
def test_within_and_gaps_part_a_range(
    operations: list[tuple[bool, tuple[int, int]]], part: tuple[int, int]
) -> None:
    intervals, model = build(operations)
    wanted = set(range(*part))
    assert members(intervals.within(*part)) == sorted(wanted & model)
    assert members(intervals.gaps(*part)) == sorted(wanted - model)
    assert all(start < stop for start, stop in intervals.within(*part) + intervals.gaps(*part))


@given(st.lists(RANGES, max_size=8))
def test_ranges_are_joined(ranges: list[tuple[int, int]]) -> None:
    whole = joined(ranges)
    assert members(whole) == sorted(set(members(ranges)))
    bounds = [bound for pair in whole for bound in pair]
    assert bounds == sorted(set(bounds))


@given(OPERATIONS, RANGES)
def test_meets_what_it_shares_a_number_with(
    operations: list[tuple[bool, tuple[int, int]]], part: tuple[int, int]
) -> None:
    intervals, model = build(operations)
    assert intervals.meets(*part) == bool(model & set(range(*part)))


def test_a_range_that_ends_before_it_begins_is_refused() -> None:
    for change in (IntervalSet().add, IntervalSet().remove):
        with pytest.raises(ValueError, match=r"\[3, 2\) is not a range"):
            change(3, 2)
    for take in (IntervalSet, joined):
        with pytest.raises(ValueError, match="not a range"):
            take([(3, 2)])


def test_ranges_that_touch_are_one() -> None:
    assert list(IntervalSet([(0, 2), (2, 3), (5, 6)])) == [(0, 3), (5, 6)]

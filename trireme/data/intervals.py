"""Sets of whole numbers, stored as ranges: compact where the numbers are nearly contiguous."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["IntervalSet", "joined"]


class IntervalSet:
    """A set of integers as sorted half-open ranges (start, stop) that neither overlap nor touch.

    Adding and removing take two binary searches, and time for each range that is joined or cut.
    """

    __slots__ = ("_starts", "_stops", "_total")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Holds the union of `ranges`, which may overlap and come in any order.

        Raises:
            ValueError: a range ends before it begins.
        """
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._total = 0
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> int:
        """Adds the numbers start to stop - 1; returns how many of them were new.

        Raises:
            ValueError: stop is below start.
        """
        _check(start, stop)
        if start == stop:
            return 0
        starts, stops = self._starts, self._stops
        if starts and stops[-1] == start:  # the common case: the next ones
            stops[-1] = stop
            self._total += stop - start
            return stop - start
        low = bisect_left(stops, start)  # the first range that reaches up to start
        if low < len(stops) and stops[low] == start and starts[low + 1 : low + 2] > [stop]:
            stops[low] = stop  # nearly as common: the next ones of one of several sequences
            self._total += stop - start
            return stop - start
        high = bisect_right(starts, stop)  # behind the last one that begins by stop
        before = sum(stops[low:high]) - sum(starts[low:high])
        if low < high:
            start, stop = min(start, starts[low]), max(stop, stops[high - 1])
        starts[low:high] = [start]
        stops[low:high] = [stop]
        new = stop - start - before
        self._total += new
        return new

    def remove(self, start: int, stop: int) -> int:
        """Removes the numbers start to stop - 1; returns how many of them were there.

        Raises:
            ValueError: stop is below start.
        """
        _check(start, stop)
        starts, stops = self._starts, self._stops
        if not starts or start == stop:
            return 0
        if starts[0] == start and stop < stops[0]:  # the common case: the first ones
            starts[0] = stop
            self._total -= stop - start
            return stop - start
        low = bisect_right(stops, start)  # the first range that goes beyond start
        high = bisect_left(starts, stop)  # behind the last one that begins before stop
        if low >= high:
            return 0
        before = sum(stops[low:high]) - sum(starts[low:high])
        left, right = starts[low], stops[high - 1]
        rest = [(a, b) for a, b in ((left, start), (stop, right)) if a < b]
        starts[low:high] = [a for a, _ in rest]
        stops[low:high] = [b for _, b in rest]
        gone = before - sum(b - a for a, b in rest)
        self._total -= gone
        return gone

    def add_all(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Adds ranges, which must be `joined`; returns how many numbers were new."""
        if len(ranges) > 1 and (not self._stops or self._stops[-1] < ranges[0][0]):
            starts, stops = _columns(ranges)  # all of them lie behind all that is there
            self._starts += starts
            self._stops += stops
            new = sum(stops) - sum(starts)
            self._total += new
            return new
        return sum([self.add(start, stop) for start, stop in ranges])

    def remove_all(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Removes ranges, which must be `joined`; returns how many numbers were there."""
        starts, stops = _columns(ranges)
        count = len(starts)
        if count > 1 and self._starts[:count] == starts and self._stops[:count] == stops:
            del self._starts[:count], self._stops[:count]  # the common case: the first ones
            gone = sum(stops) - sum(starts)
            self._total -= gone
            return gone
        return sum([self.remove(start, stop) for start, stop in ranges])

    def meets(self, start: int, stop: int) -> bool:
        """Whether any number from start to stop - 1 is in the set."""
        low = bisect_right(self._stops, start)
        return start < stop and low < len(self._starts) and self._starts[low] < stop

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the ranges of this set that lie in [start, stop), cut to it."""
        if start >= stop:
            return []
        low = bisect_right(self._stops, start)
        high = bisect_left(self._starts, stop)
        return [(max(start, self._starts[i]), min(stop, self._stops[i])) for i in range(low, high)]

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the ranges of [start, stop) that this set lacks."""
        missing = []
        for a, b in self.within(start, stop):
            if start < a:
                missing.append((start, a))
            start = b
        if start < stop:
            missing.append((start, stop))
        return missing

    @property
    def total(self) -> int:
        """How many numbers the set holds."""
        return self._total

    @property
    def end(self) -> int:
        """One above the highest number; 0 when the set is empty."""
        return self._stops[-1] if self._stops else 0

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Returns the ranges, lowest first: what the constructor takes."""
        return tuple(self)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterates over the ranges, lowest first."""
        return zip(self._starts, self._stops, strict=True)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IntervalSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the same numbers as sorted ranges that neither overlap nor touch, none of them empty.

    Raises:
        ValueError: a range ends before it begins.
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        _check(start, stop)
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return found


def _columns(ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [start for start, _ in ranges], [stop for _, stop in ranges]


def _check(start: int, stop: int) -> None:
    if stop < start:
        raise ValueError(f"[{start}, {stop}) is not a range: it ends before it begins")

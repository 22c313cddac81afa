"""Sets of whole numbers, stored as ranges: compact where the numbers are nearly contiguous."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain


class IntervalSet:
    """A set of integers as sorted half-open ranges (start, stop) that neither overlap nor touch.

    Adding and removing take two binary searches, and time for each range that is joined or cut.
    """

    __slots__ = ("_bounds",)

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        # The start and the stop of each range in turn: a number with an odd number of bounds up to
        # it is in the set.
        self._bounds = list(chain.from_iterable(joined(ranges)))

    def add(self, start: int, stop: int) -> None:
        _check(start, stop)
        if start < stop:
            low, high = bisect_left(self._bounds, start), bisect_right(self._bounds, stop)
            self._bounds[low:high] = [start] * (low % 2 == 0) + [stop] * (high % 2 == 0)

    def remove(self, start: int, stop: int) -> None:
        """Removes the numbers start to stop - 1, those of them that are there."""
        _check(start, stop)
        if start < stop:
            low, high = bisect_left(self._bounds, start), bisect_right(self._bounds, stop)
            self._bounds[low:high] = [start] * (low % 2) + [stop] * (high % 2)

    def meets(self, start: int, stop: int) -> bool:
        """Whether any number from start to stop - 1 is in the set."""
        low = bisect_right(self._bounds, start)
        return start < stop and (low % 2 == 1 or low < bisect_left(self._bounds, stop))

    def within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the ranges of this set that lie in [start, stop), cut to it."""
        return self._cut(start, stop, outside=0)

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the ranges of [start, stop) that this set lacks."""
        return self._cut(start, stop, outside=1)

    def _cut(self, start: int, stop: int, *, outside: int) -> list[tuple[int, int]]:
        if start >= stop:
            return []
        low, high = bisect_right(self._bounds, start), bisect_left(self._bounds, stop)
        inner = self._bounds[low:high]
        cut = [start] * ((low + outside) % 2) + inner + [stop] * ((high + outside) % 2)
        return list(zip(cut[::2], cut[1::2], strict=True))

    @property
    def end(self) -> int:
        """One above the highest number; 0 when the set is empty."""
        return self._bounds[-1] if self._bounds else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        bounds = iter(self._bounds)
        return zip(bounds, bounds, strict=True)

    def __bool__(self) -> bool:
        return bool(self._bounds)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the same numbers as sorted ranges that neither overlap nor touch; none is empty."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        _check(start, stop)
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        elif start < stop:
            found.append((start, stop))
    return found


def _check(start: int, stop: int) -> None:
    if stop < start:
        raise ValueError(f"[{start}, {stop}) is not a range: it ends before it begins")

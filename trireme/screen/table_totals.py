"""Totals of each sparse table, from the status of the tasks that hold its rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trireme.cluster.messages import StatusValue
from trireme.monitor.numbers import number, number_of, size

_COUNTS = ("rows", "waiting", "bytes", "hits", "misses", "admitted", "dropped")
_HOTTEST = 5
_HOT_KEY = re.compile(r"(-?\d+) \((\d+)\)")


@dataclass(frozen=True, slots=True)
class TableTotals:
    """The totals of one table over all tasks that hold a part of it."""

    name: str
    rows: int
    waiting: int
    bytes: int
    hits: int
    misses: int
    admitted: int
    dropped: int
    hottest: tuple[tuple[int, int], ...]

    @property
    def hit_share(self) -> float:
        """The share of the pulled keys that had rows; 0 where none was pulled."""
        return self.hits / max(self.hits + self.misses, 1)

    def hottest_keys(self, most: int = 3) -> str:
        """Returns the hottest keys in words, such as `7 (1,200 updates), -3 (800)`."""
        shown = [f"{key} ({number(touches)})" for key, touches in self.hottest[:most]]
        return ", ".join(shown).replace(")", " updates)", 1)

    def line(self) -> str:
        """Returns the totals in one line."""
        parts = [f"table {self.name}: {number(self.rows)} rows in {size(self.bytes)}"]
        if self.hits + self.misses:
            parts.append(f"{self.hit_share:.1%} of pulled keys had rows")
        if self.waiting:
            parts.append(f"keys waiting for admission: {number(self.waiting)}")
        if self.dropped:
            parts.append(f"{number(self.dropped)} dropped")
        if self.hottest:
            parts.append(f"hottest keys: {self.hottest_keys()}")
        return "; ".join(parts)


def table_totals(statuses: Iterable[Mapping[str, StatusValue]]) -> list[TableTotals]:
    """Returns the totals of each table, in the order of their names.

    A number of table T has a name such as `table/rows/T` in a status.
    """
    every = list(statuses)
    names = sorted(
        {
            name.removeprefix("table/rows/")
            for status in every
            for name in status
            if name.startswith("table/rows/")
        }
    )
    return [_totals(name, every) for name in names]


def _totals(name: str, statuses: Sequence[Mapping[str, StatusValue]]) -> TableTotals:
    sums = {
        count: int(sum(number_of(status, f"table/{count}/{name}") for status in statuses))
        for count in _COUNTS
    }
    found = [
        (int(key), int(touches))
        for status in statuses
        for key, touches in _HOT_KEY.findall(str(status.get(f"table/hottest/{name}", "")))
    ]
    hottest = sorted(found, key=lambda each: (-each[1], each[0]))[:_HOTTEST]
    return TableTotals(name, **sums, hottest=tuple(hottest))

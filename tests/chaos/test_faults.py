"""Which faults are drawn, and in which order."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.chaos.faults import Bag, Fault


class Named(Fault):
    """A fault that may hit those that the test names."""

    def __init__(self, name: str, *targets: str) -> None:
        self.name = name  # type: ignore[misc]
        self.there = targets

    def targets(self, job: Any, status: Any) -> tuple[str, ...]:
        return self.there

    def strike(self, job: Any, target: str) -> None:
        raise AssertionError("nothing is to be hit here")


def drawn(bag: Bag, count: int) -> list[tuple[str, str]]:
    job: Any = None
    return [(each[0].name, each[1]) for _ in range(count) if (each := bag.draw(job, job))]


def test_each_kind_comes_once_before_any_comes_again() -> None:
    names = ["kill", "stop", "cut", "add"]
    bag = Bag([Named(name, "a", "b") for name in names], 3)
    for _ in range(5):
        assert sorted(name for name, _ in drawn(bag, 4)) == sorted(names)


def test_a_kind_that_hits_nobody_now_is_made_up_for() -> None:
    late = Named("late")
    bag = Bag([Named("kill", "a"), late], 3)
    assert drawn(bag, 3) == [("kill", "a")] * 3
    late.there = ("b",)
    assert drawn(bag, 1) == [("late", "b")]
    assert Counter(name for name, _ in drawn(bag, 2)) == {"kill": 1, "late": 1}
    assert drawn(Bag([Named("late")], 3), 1) == []


def test_a_seed_repeats_the_order() -> None:
    faults = [Named(name, "a", "b", "c") for name in ("kill", "stop", "cut")]
    assert drawn(Bag(faults, 7), 9) == drawn(Bag(faults, 7), 9)
    assert drawn(Bag(faults, 7), 9) != drawn(Bag(faults, 8), 9)

"""Whether what workers have seen is one history: a check of pulls against pushes.

Where each update adds one to the element of its worker, values are counts of the updates in them.
What was seen of one slot must be ordered: of any two, one has at least as many of each worker as
the other. It must respect real time: what is asked for after something was received, or after an
update was acknowledged, has all of that in it. And nothing is in it that was not begun.
Source: Herlihy and Wing, Linearizability (ACM TOPLAS 12(3), 1990).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.simulation.dealing import Violation

Key = tuple[int, int]
"""A life, with a worker or a slot."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One slot's counts, as somebody has received them.

    Attributes:
        asked, received: when.
        counts: by worker, how many updates are in the values.
        acknowledged: by worker, how many were acknowledged when it was asked.
        begun: by worker, how many were begun when it was received.
    """

    asked: float
    received: float
    counts: tuple[int, ...]
    acknowledged: tuple[int, ...]
    begun: tuple[int, ...]


class Counting:
    """All that was seen of a job.

    Attributes:
        begun: by life and worker: how many updates it has begun.
        acknowledged: how many of them it knows to be applied.
    """

    def __init__(self) -> None:
        self.begun: Counter[Key] = Counter()
        self.acknowledged: Counter[Key] = Counter()
        self._seen: Mapping[Key, list[Observation]] = defaultdict(list)
        self._loaded: Mapping[Key, set[tuple[int, ...]]] = defaultdict(set)

    def known(self, life: int, workers: int) -> tuple[int, ...]:
        """Returns by worker how many updates are acknowledged."""
        return tuple(self.acknowledged[life, worker] for worker in range(workers))

    def load(self, life: int, slot: int, counts: Sequence[float]) -> None:
        """A slot's values were loaded, as they were in another life or another job."""
        self._loaded[life, slot].add(tuple(map(int, counts)))

    def observe(
        self,
        life: int,
        slot: int,
        times: tuple[float, float],
        counts: Sequence[float],
        acknowledged: tuple[int, ...],
    ) -> None:
        """Somebody has received a slot's values.

        Args:
            life: the job's.
            slot: which.
            times: when it was asked for, and when it was received.
            counts: by worker, how many updates are in it.
            acknowledged: what `known` returned when it was asked for.
        """
        begun = tuple(self.begun[life, worker] for worker in range(len(counts)))
        seen = Observation(*times, tuple(map(int, counts)), acknowledged, begun)
        self._seen[life, slot].append(seen)

    def check(self) -> None:
        """Checks all that was seen.

        Raises:
            Violation: it is not one history.
        """
        for (life, slot), seen in self._seen.items():
            _check_order(slot, seen)
            _check_counts(slot, seen, self._loaded[life, slot])
            _check_time(slot, seen)

    @property
    def observations(self) -> int:
        """How many there were."""
        return sum(map(len, self._seen.values()))


def _check_order(slot: int, seen: Sequence[Observation]) -> None:
    ordered = sorted({each.counts for each in seen}, key=lambda counts: (sum(counts), counts))
    for one, other in pairwise(ordered):
        if any(a > b for a, b in zip(one, other, strict=True)):
            raise Violation(f"slot {slot} was seen as {one} and as {other}")


def _check_counts(slot: int, seen: Sequence[Observation], loaded: set[tuple[int, ...]]) -> None:
    """All that was acknowledged is there, on top of what was loaded, and nothing else."""
    for each in seen:
        made = [[a - b for a, b in zip(each.counts, base, strict=False)] for base in loaded]
        if not any(_between(each.acknowledged, counts, each.begun) for counts in made):
            raise Violation(
                f"slot {slot} was seen as {each.counts}, when {each.acknowledged} updates were "
                f"acknowledged and {each.begun} begun, after {loaded} had been loaded"
            )


def _between(least: Sequence[int], counts: Sequence[int], most: Sequence[int]) -> bool:
    return all(low <= n <= high for low, n, high in zip(least, counts, most, strict=True))


def _check_time(slot: int, seen: Sequence[Observation]) -> None:
    """The largest that was received before something was asked for is in that."""
    received = sorted(seen, key=lambda each: each.received)
    largest, at = 0, 0
    for each in sorted(seen, key=lambda each: each.asked):
        while at < len(received) and received[at].received < each.asked:
            largest = max(largest, sum(received[at].counts))
            at += 1
        if sum(each.counts) < largest:
            raise Violation(f"slot {slot} was seen as {each.counts} after more had been seen")

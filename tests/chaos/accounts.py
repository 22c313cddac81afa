"""What became of each update, and how much time was lost: pure functions of notes and values.

acknowledged <= applied <= attempted        for each incarnation of each worker
acknowledged == applied == attempted - stale    for those that lived to the end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

COUNTERS = ("before", "between", "behind")
"""The program's parameters that count."""

Incarnation = tuple[int, int]
"""A worker's index, and the number of its start."""


@dataclass(frozen=True)
class Note:
    """Something that a worker's process has noted.

    Attributes:
        what: `joined`, `attempted`, `retried`, `acknowledged`, `stale`, `unknown` or `ended`.
        worker, incarnation: who.
        at: when, by the monotonic clock, in seconds.
        figure: of `joined`: the processor time that the process had used by then, in seconds.
    """

    what: str
    worker: int
    incarnation: int
    at: float
    figure: float = 0.0

    def line(self) -> str:
        """The note as a line of a file."""
        return f"{self.what} {self.worker} {self.incarnation} {self.at:.6f} {self.figure:.3f}\n"

    @classmethod
    def read(cls, line: str) -> Note:
        """Reads what `line` wrote."""
        what, worker, incarnation, at, figure = line.split()
        return cls(what, int(worker), int(incarnation), float(at), float(figure))


@dataclass(frozen=True)
class Account:
    """The updates of one incarnation.

    Attributes:
        attempted, acknowledged, stale: how many, by its own notes.
        ended: whether it lived until the job's end.
        applied: how many are in the values, by each counter.
    """

    attempted: int
    acknowledged: int
    stale: int
    ended: bool
    applied: tuple[float, ...]

    def problem(self) -> str:
        """What is not as it has to be; empty if nothing is."""
        if len(set(self.applied)) != 1:
            return f"parts of the values disagree: {self.applied}"
        applied = self.applied[0]
        if applied != int(applied):
            return f"{applied} updates are in the values, which is no whole number"
        if applied < self.acknowledged:
            return f"{self.acknowledged - applied:.0f} acknowledged updates are LOST"
        if applied > self.attempted - self.stale:
            return f"{applied - self.attempted + self.stale:.0f} updates are applied TWICE"
        if self.ended and not self.acknowledged == applied == self.attempted - self.stale:
            return "it lived to the end, and not every update of it is acknowledged and applied"
        return ""


def accounts(
    notes: Iterable[Note], applied: Mapping[Incarnation, tuple[float, ...]]
) -> dict[Incarnation, Account]:
    """Returns the account of every incarnation that noted something or that the values know.

    Args:
        notes: of all processes.
        applied: each incarnation's row of each counter; those of zeros may be left out.
    """
    counts: dict[Incarnation, Counter[str]] = {}
    for note in notes:
        counts.setdefault((note.worker, note.incarnation), Counter())[note.what] += 1
    zeros = (0.0,) * len(COUNTERS)
    return {
        who: Account(
            attempted=counts.get(who, Counter())["attempted"],
            acknowledged=counts.get(who, Counter())["acknowledged"],
            stale=counts.get(who, Counter())["stale"],
            ended=counts.get(who, Counter())["ended"] > 0,
            applied=applied.get(who, zeros),
        )
        for who in sorted({*counts, *applied})
    }


# Time --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Struck:
    """A fault that was made.

    Attributes:
        fault: its name.
        target: whom it hit.
        at: when it began, by the monotonic clock.
        over: when everything was whole again.
    """

    fault: str
    target: str
    at: float
    over: float


def longest_gap(times: Sequence[float], start: float, stop: float) -> float:
    """Returns the longest time within [start, stop] in which nothing was acknowledged.

    Args:
        times: when updates were acknowledged, in order.
        start, stop: the part of the time that is looked at.
    """
    inside = [start, *(time for time in times if start < time < stop), stop]
    return max(after - before for before, after in pairwise(inside))


@dataclass(frozen=True)
class FaultRow:
    """A line of the table of faults: how often, and for how many seconds nothing went on."""

    fault: str
    count: int
    median_stall: float
    worst_stall: float


def fault_table(struck: Sequence[Struck], times: Sequence[float]) -> list[FaultRow]:
    """Returns a line for each kind of fault.

    A fault's stall is the longest gap between its begin and the time when all was whole again.
    """
    stalls: dict[str, list[float]] = {}
    for each in struck:
        stalls.setdefault(each.fault, []).append(longest_gap(times, each.at, each.over))
    return [FaultRow(n, len(s), median(s), max(s)) for n, s in sorted(stalls.items())]


@dataclass(frozen=True)
class Goodput:
    """How many updates a run applied, and in what time.

    Attributes:
        updates: acknowledged within the time.
        seconds: of the clock.
        starting: seconds of processors that interpreters took which were started meanwhile.
        cores: how many cores there are.
    """

    updates: int
    seconds: float
    starting: float
    cores: int

    @property
    def plain(self) -> float:
        """Updates a second."""
        return self.updates / self.seconds

    def without_starts(self, silence: float = 0.0) -> float:
        """Returns updates a second of the time that the starting interpreters left to the others.

        Args:
            silence: seconds of waiting for a deadline to take out as well.
        """
        return self.updates / max(self.seconds - self.starting / self.cores - silence, 1e-9)


def goodput(notes: Iterable[Note], start: float, stop: float, others: float, cores: int) -> Goodput:
    """Returns the goodput of a part of a run.

    Args:
        notes: of all workers.
        start, stop: the part.
        others: seconds of processors that servers and coordinators took to start in it.
        cores: how many cores there are.
    """
    inside = [note for note in notes if start <= note.at <= stop]
    updates = sum(note.what == "acknowledged" for note in inside)
    started = sum(note.figure for note in inside if note.what == "joined")
    return Goodput(updates, stop - start, started + others, cores)


def acknowledged_at(notes: Iterable[Note]) -> list[float]:
    """Returns when updates were acknowledged, in order."""
    return sorted(note.at for note in notes if note.what == "acknowledged")


def unanswered(accounts: Iterable[Account]) -> int:
    """Returns how many updates were attempted whose workers never heard what became of them."""
    return sum(each.attempted - each.acknowledged - each.stale for each in accounts)

"""What a benchmark found: figures by condition and contender, and the goals they were to meet."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.pairs import Interleaved, Sample, Spread, paired_ratio

Kind = Literal["trireme", "peer", "limit", "information"]


@dataclass(frozen=True)
class Entry:
    """One contender under one condition.

    Attributes:
        condition: such as `32 MB, 1 server`; "" where there is only one.
        contender: its name.
        kind: ours, a peer's, a limit, or only for information.
        samples: one a round.
        x: the condition as a number, for a plot against it; NaN for a plot of bars.
    """

    condition: str
    contender: str
    kind: Kind
    samples: tuple[Sample, ...]
    x: float = math.nan

    @property
    def values(self) -> list[float]:
        """The figures, round by round."""
        return [sample.value for sample in self.samples]

    def of_start(self, start: int) -> list[float]:
        """Returns the figures of one start, round by round."""
        return [sample.value for sample in self.samples if sample.start == start]

    @property
    def spread(self) -> Spread:
        """The figures in three."""
        return Spread.of(self.values)

    @property
    def cpu_seconds(self) -> float:
        """The processors' time in all rounds; NaN where it is not known."""
        return math.fsum(sample.cpu_seconds for sample in self.samples)

    @property
    def cpu_per_work(self) -> float:
        """The processors' seconds for one unit of work; NaN where it is not known."""
        work = math.fsum(sample.work for sample in self.samples)
        return self.cpu_seconds / work if work else math.nan


@dataclass(frozen=True)
class Goal:
    """What a ratio should be.

    Attributes:
        text: in words.
        condition: under which.
        contender: over which.
        reference: which other contender.
        at_least, at_most: the bounds; one of them or both.
        reference_condition: the other's condition, where it is not the same.
        by: what the ratio is: the median of the ratios of pairs, the least of them, or the ratio of
            the means.
    """

    text: str
    condition: str
    contender: str
    reference: str
    at_least: float | None = None
    at_most: float | None = None
    reference_condition: str | None = None
    by: Literal["pairs", "least", "means"] = "pairs"

    def met_by(self, ratio: float) -> bool:
        """Returns whether a ratio is what it should be."""
        if self.at_least is not None and not ratio >= self.at_least:
            return False
        return self.at_most is None or ratio <= self.at_most

    def ratio(self, values: Sequence[float], reference: Sequence[float]) -> float:
        """Returns the ratio of some figures."""
        if self.by == "means":
            return statistics.fmean(values) / statistics.fmean(reference)
        if self.by == "least":
            return min(a / b for a, b in zip(values, reference, strict=False))
        return paired_ratio(values, reference)

    @property
    def bound(self) -> str:
        """The bound in words."""
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least:g} to {self.at_most:g}"
        if self.at_least is not None:
            return f"at least {self.at_least:g}"
        return f"at most {self.at_most:g}"


@dataclass(frozen=True)
class Verdict:
    """A goal and what was measured.

    Attributes:
        goal: the goal.
        ratio: over all rounds; None where one side is missing.
        by_start: over the rounds of each start.
    """

    goal: Goal
    ratio: float | None
    by_start: tuple[float, ...] = ()

    @property
    def word(self) -> str:
        """How it went."""
        if self.ratio is None:
            return "not measured"
        return "met" if self.goal.met_by(self.ratio) else "missed"


@dataclass
class Result:
    """All that one benchmark found.

    Attributes:
        name: a word, which names its files.
        title: a line.
        unit: of the figures.
        higher_is_better: of the figures; None where it depends on the condition.
        references: the contenders to whose figures the others' ratios are shown.
        work: what a unit of work is, for the processors' time.
        x_label: what `Entry.x` is; "" where there is none.
        entries: the figures.
        goals: what should be met.
        notes: what a reader must know.
        skipped: what was not measured, and why.
        failed: what of ours could not be measured, and why.
    """

    name: str
    title: str
    unit: str
    higher_is_better: bool | None
    references: tuple[str, ...] = ()
    work: str = "step"
    x_label: str = ""
    entries: list[Entry] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(
        self,
        measured: Interleaved,
        kinds: dict[str, Kind],
        *,
        condition: str = "",
        x: float = math.nan,
    ) -> None:
        """Takes in what contenders measured in turn came to."""
        for name, samples in measured.samples.items():
            if samples:
                self.entries.append(Entry(condition, name, kinds[name], tuple(samples), x))
        for name, reason in measured.failed.items():
            where = f" at {condition}" if condition else ""
            line = f"{name}{where} failed: {reason}"
            (self.failed if kinds[name] == "trireme" else self.skipped).append(line)

    def find(self, condition: str, contender: str) -> Entry | None:
        """Returns an entry, if there is one."""
        for entry in self.entries:
            if entry.condition == condition and entry.contender == contender:
                return entry
        return None

    @property
    def conditions(self) -> list[str]:
        """The conditions, in the order in which they came."""
        return list(dict.fromkeys(entry.condition for entry in self.entries))

    @property
    def contenders(self) -> list[str]:
        """The contenders, in the order in which they came."""
        return list(dict.fromkeys(entry.contender for entry in self.entries))

    def ratio(self, entry: Entry, reference: str) -> float | None:
        """Returns an entry's figure over a reference's in the same rounds, if that is there."""
        other = self.find(entry.condition, reference)
        return None if other is None else paired_ratio(entry.values, other.values)

    def verdicts(self) -> list[Verdict]:
        """Returns how each goal went."""
        return [self._verdict(goal) for goal in self.goals]

    def _verdict(self, goal: Goal) -> Verdict:
        elsewhere = goal.reference_condition
        entry = self.find(goal.condition, goal.contender)
        other = self.find(goal.condition if elsewhere is None else elsewhere, goal.reference)
        if entry is None or other is None:
            return Verdict(goal, None)
        starts = sorted({sample.start for sample in entry.samples})
        by_start = [goal.ratio(entry.of_start(n), other.of_start(n)) for n in starts]
        return Verdict(goal, goal.ratio(entry.values, other.values), tuple(by_start))

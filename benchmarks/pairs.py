"""Interleaving and statistics: contenders are measured in turn, A B C A B C, and compared in pairs.

What else the machine does comes and goes in seconds; contenders measured in turn meet the same of
it, and a ratio is the median over the rounds of one contender's figure over another's in the same
round, not the ratio of two medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        value: the figure, in the benchmark's unit.
        work: how much was done meanwhile, such as steps or exchanges.
        cpu_seconds: what all processes of the contender used of the processors meanwhile; NaN
            where that is not known.
        start: which start of the contenders it is of, where they are started several times.
        nbytes: what passed the loopback interface meanwhile; NaN where that is not known.
    """

    value: float
    work: float = 0.0
    cpu_seconds: float = float("nan")
    start: int = 0
    nbytes: float = float("nan")


class Contender(Protocol):
    """Something that can be measured again and again, and does nothing in between."""

    @property
    def name(self) -> str:
        """What it is called in the results."""

    def measure(self) -> Sample:
        """Measures once."""


@dataclass(frozen=True)
class Plan:
    """How often to measure.

    Attributes:
        rounds: how many rounds count.
        warmup: how many are made before and thrown away.
        seconds: no round is begun after so many, if `least` rounds are in.
        least: how many rounds there must be.
    """

    rounds: int
    warmup: int = 1
    seconds: float = float("inf")
    least: int = 3


@dataclass
class Interleaved:
    """What came of it.

    Attributes:
        samples: by contender, one a round; those that failed are not in it.
        failed: by contender, why.
    """

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def values(self, name: str) -> list[float]:
        """Returns a contender's figures, round by round."""
        return [sample.value for sample in self.samples[name]]

    def extend(self, later: Interleaved, start: int) -> None:
        """Takes in the rounds of another start; what failed in either is left out of both."""
        self.failed.update(later.failed)
        for name, samples in later.samples.items():
            self.samples.setdefault(name, []).extend(replace(s, start=start) for s in samples)
        for name in self.failed:
            self.samples.pop(name, None)


def interleave(
    contenders: Sequence[Contender],
    plan: Plan,
    *,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
) -> Interleaved:
    """Measures all contenders in turn, round after round.

    A contender that fails is left out from then on, and all its figures with it.

    Args:
        contenders: in the order of their turns.
        plan: how often.
        clock: for the plan's seconds.
        say: told of each failure.
    """
    result = Interleaved({contender.name: [] for contender in contenders})
    begun = clock()
    for number in range(plan.warmup + plan.rounds):
        counted = number - plan.warmup
        if counted >= plan.least and clock() - begun >= plan.seconds:
            break
        for contender in contenders:
            if contender.name in result.failed:
                continue
            try:
                sample = contender.measure()
            except Exception as error:  # whatever a peer comes up with: the others go on
                result.failed[contender.name] = f"{type(error).__name__}: {error}"
                result.samples.pop(contender.name)
                say(f"{contender.name} failed: {result.failed[contender.name]}")
            else:
                if counted >= 0:
                    result.samples[contender.name].append(sample)
    return result


@dataclass(frozen=True)
class Spread:
    """A few figures in three.

    Attributes:
        low, high: the quartiles; the extremes where there are fewer than four.
        median: the median.
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of at least one figure.

        Raises:
            ValueError: there is none.
        """
        if not values:
            raise ValueError("there are no figures to summarise")
        median = statistics.median(values)
        if len(values) < 4:
            return cls(min(values), median, max(values))
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    """Returns the median of the ratios of figures that belong to the same rounds.

    Where one has more rounds than the other, the last of them have no partner and do not count.

    Raises:
        ValueError: there is no pair.
    """
    ratios = [a / b for a, b in zip(values, reference, strict=False) if b]
    if not ratios:
        raise ValueError("there is no pair of figures to compare")
    return statistics.median(ratios)

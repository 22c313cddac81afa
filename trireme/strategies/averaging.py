"""Workers that train by themselves, and average their parameters now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["Averaging"]


@dataclass(frozen=True)
class Averaging(Strategy):
    """Each worker trains with its own optimizer for `every` steps; then all take the average.

    With SGD and `every=1` it is `Sync` by another name: the mean of parameters that one step was
    made from is one step by the mean gradient. Source: McMahan et al., Communication-Efficient
    Learning of Deep Networks from Decentralized Data (AISTATS 2017), algorithm 1, with every
    worker in every round.

    With a staleness bound nobody waits for a round: what a worker has learned is added to the
    global values when it comes, multiplied by `share`, and the worker goes on from there. Source:
    Zhang et al., Deep learning with Elastic Averaging SGD (NIPS 2015), section 3, from which it
    differs in that the worker takes the global values over instead of being drawn to them.

    Attributes:
        every: how many steps a worker makes between two exchanges, at least 1.
        staleness: None for rounds of all workers; K >= 1: deltas are applied as they come, and a
            worker waits while it is more than K exchanges ahead of the slowest.
        share: how much of a delta is added where deltas are applied as they come; None for one
            part in as many as there are workers. In rounds it has no meaning.
    """

    name: ClassVar[str] = "averaging"
    every: int = 16
    staleness: int | None = None
    share: float | None = None

    def rule(self) -> Rule:
        """Returns the rule: deltas, in rounds of all or each by itself.

        Raises:
            ConfigurationError: a value is out of range.
        """
        if self.staleness is not None and self.staleness < 1:
            raise ConfigurationError(
                f"averaging with staleness {self.staleness}: give 1 or more, or leave it out for "
                "rounds of all workers"
            )
        if self.share is not None and (self.staleness is None or not 0 < self.share <= 1):
            raise ConfigurationError(
                f"averaging with share {self.share}: it is above 0 and at most 1, and needs a "
                "staleness: in rounds the average of all deltas is added whole"
            )
        rounds = self.staleness is None
        rule = Rule(
            aggregate=0 if rounds else 1,
            staleness=0 if rounds else self.staleness,
            every=self.every,
        )
        rule.check()
        return rule

    def check(self, *, workers: int, servers: int) -> None:
        """Any cluster will do."""

    def outer(self, workers: int) -> Mapping[str, float | bool]:
        """Returns a step of plain SGD: values - mean(pulled - current) is the mean of `current`."""
        if self.staleness is None:
            return {"lr": 1.0}
        return {"lr": self.share if self.share is not None else 1.0 / workers}

"""Parameter averaging: workers train locally, and average their parameters periodically."""

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

    With SGD and `every=1` it equals `Sync`: the mean of parameters after one step each is the
    result of one step with the mean gradient. Source: McMahan et al., Communication-Efficient
    Learning of Deep Networks from Decentralized Data (AISTATS 2017), algorithm 1, with every
    worker in every round.

    With a staleness bound there are no rounds: a worker's delta is multiplied by `share` and added
    to the global values when it arrives, and the worker continues from the new values. Source:
    Zhang et al., Deep learning with Elastic Averaging SGD (NIPS 2015), section 3; here the worker
    takes over the global values instead of moving towards them.

    Attributes:
        every: the number of steps between two exchanges, at least 1.
        staleness: None for rounds of all workers; K >= 1: deltas are applied as they arrive, and a
            worker waits while it is more than K exchanges ahead of the slowest.
        share: the factor of a delta where deltas are applied as they arrive; None for 1 / workers.
            Rounds do not use it.
        uncommitted: as in `Async`, where deltas are applied as they arrive.
    """

    name: ClassVar[str] = "averaging"
    every: int = 16
    staleness: int | None = None
    share: float | None = None
    uncommitted: bool = False

    def __post_init__(self) -> None:
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
        if self.uncommitted and self.staleness is None:
            raise ConfigurationError(
                "averaging with uncommitted: in rounds the servers agree on each step; give a "
                "--staleness too, or leave --uncommitted out"
            )
        self.rule().check()

    def rule(self) -> Rule:
        """Returns the rule: deltas, in rounds of all workers or one by one."""
        rounds = self.staleness is None
        return Rule(
            aggregate=0 if rounds else 1,
            staleness=0 if rounds else self.staleness,
            every=self.every,
            uncommitted=self.uncommitted,
        )

    def outer(self, workers: int) -> Mapping[str, float | bool]:
        """Returns a step of plain SGD: values - mean(pulled - current) is the mean of `current`."""
        if self.staleness is None:
            return {"lr": 1.0}
        return {"lr": self.share if self.share is not None else 1.0 / workers}

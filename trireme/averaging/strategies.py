"""The strategies whose workers train locally, and push what their steps have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies import Strategy


@dataclass(frozen=True)
class Averaging(Strategy):
    """Each worker trains with its own optimizer for `every` steps; then all take the average.

    With SGD and `every=1` it equals `Sync`: the mean of parameters after one step each is the
    result of one step with the mean gradient. Source: McMahan et al., Communication-Efficient
    Learning of Deep Networks from Decentralized Data (AISTATS 2017), algorithm 1, with every
    worker in every round.

    With a staleness bound there are no rounds: a worker's delta is multiplied by 1 / workers and
    added to the global values when it arrives, and the worker continues from the new values.
    Source: Zhang et al., Deep learning with Elastic Averaging SGD (NIPS 2015), section 3.

    Attributes:
        every: the number of steps between two exchanges, at least 1.
        staleness: None for rounds of all workers; K >= 1: deltas are applied as they arrive, and a
            worker waits while it is more than K exchanges ahead of the slowest.
    """

    name: ClassVar[str] = "averaging"
    every: int = 16
    staleness: int | None = None

    def __post_init__(self) -> None:
        self._at_least_one("every", "staleness")

    def rule(self) -> Rule:
        if self.staleness is None:
            return Rule(aggregate=0, staleness=0, every=self.every)
        return Rule(aggregate=1, staleness=self.staleness, every=self.every)

    def outer(self, workers: int) -> Mapping[str, float | bool]:
        # A step of plain SGD by 1.0: values - mean(pulled - current) is the mean of `current`.
        return {"lr": 1.0 if self.staleness is None else 1.0 / workers}


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """As `Averaging`, but the mean delta is the gradient of a Nesterov step on the servers.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models
    (2023), algorithm 1; docs/strategies.md explains the defaults here.

    Attributes:
        every: the number of steps between two exchanges, at least 1.
        aggregate: the number of deltas that complete an outer round; None for one of each live
            worker. A later delta is stale: it is dropped and counted, and its examples are dealt
            again.
        outer_lr: the outer optimizer's learning rate.
        outer_momentum: its Nesterov momentum; 0 for none.
    """

    name: ClassVar[str] = "diloco"
    every: int = 100
    aggregate: int | None = None
    outer_lr: float = 0.9
    outer_momentum: float = 0.5

    def __post_init__(self) -> None:
        self._at_least_one("every", "aggregate")
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise ConfigurationError(
                f"diloco with outer_lr {self.outer_lr} and outer_momentum {self.outer_momentum}: "
                "the first must be above 0, the second in [0, 1)"
            )

    def rule(self) -> Rule:
        return Rule(aggregate=self.aggregate or 0, staleness=0, every=self.every)

    def outer(self, workers: int) -> Mapping[str, float | bool]:
        momentum = self.outer_momentum
        return {"lr": self.outer_lr, "momentum": momentum, "nesterov": momentum > 0}

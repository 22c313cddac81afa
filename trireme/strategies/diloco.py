"""DiLoCo: workers train locally for long, and an outer optimizer applies their mean delta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["DiLoCo"]


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """As `Averaging`, but the mean delta is the gradient of a Nesterov step on the servers.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models
    (2023), algorithm 1. The outer learning rate and momentum there (section 3: 0.7 and 0.9) are
    for jobs of hundreds of outer rounds; docs/strategies.md explains the defaults here.

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
        if self.aggregate is not None and self.aggregate < 1:
            raise ConfigurationError(
                f"diloco with aggregate {self.aggregate}: a round needs at least one delta"
            )
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise ConfigurationError(
                f"diloco with outer_lr {self.outer_lr} and outer_momentum {self.outer_momentum}: "
                "the first must be above 0, the second in [0, 1)"
            )
        self.rule().check()

    def rule(self) -> Rule:
        """Returns the rule: rounds of deltas."""
        return Rule(aggregate=self.aggregate or 0, staleness=0, every=self.every)

    def outer(self, workers: int) -> Mapping[str, float | bool]:
        """Returns SGD with Nesterov momentum."""
        momentum = self.outer_momentum
        return {"lr": self.outer_lr, "momentum": momentum, "nesterov": momentum > 0}

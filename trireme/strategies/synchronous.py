"""Synchronous replicas: rounds of one update from each worker, or from the fastest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["Sync"]


@dataclass(frozen=True)
class Sync(Strategy):
    """The mean gradient of a round is applied as one update; then all get the new values.

    With every worker in each round it equals one process that trains on all their batches
    together. With fewer, the rest are backup workers: what comes after a round has closed is
    stale, is dropped and counted, and its examples are handed out again. Source: Chen et al.,
    Revisiting Distributed Synchronous SGD (ICLR workshop 2016), section 3.2.

    Attributes:
        aggregate: how many updates make a round; None for one of every live worker.
    """

    name: ClassVar[str] = "sync"
    aggregate: int | None = None

    def rule(self) -> Rule:
        """Returns the rule: rounds, and no update from an older one.

        Raises:
            ConfigurationError: `aggregate` is below 1.
        """
        if self.aggregate is not None and self.aggregate < 1:
            raise ConfigurationError(
                f"sync with aggregate {self.aggregate}: a round needs at least one update"
            )
        return Rule(aggregate=self.aggregate or 0, staleness=0)

    def check(self, *, workers: int, servers: int) -> None:
        """Checks that a round can fill.

        Raises:
            ConfigurationError: there are fewer workers than a round needs updates.
        """
        if self.aggregate is not None and self.aggregate > workers:
            raise ConfigurationError(
                f"sync with aggregate {self.aggregate} and {workers} workers: a round could never "
                f"fill; give at most --aggregate {workers}"
            )

"""Synchronous training: rounds of one update from each worker, or from the fastest workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["Sync"]


@dataclass(frozen=True)
class Sync(Strategy):
    """The mean gradient of a round is applied as one update; then all receive the new values.

    With every worker in each round it equals one process that trains on all their batches
    together. With fewer, the others are backup workers: an update that arrives after its round has
    closed is stale; it is dropped and counted, and its examples are dealt again. Source: Chen et
    al., Revisiting Distributed Synchronous SGD (ICLR workshop 2016), section 3.2.

    Attributes:
        aggregate: the number of updates in a round; None for one from each live worker.
    """

    name: ClassVar[str] = "sync"
    aggregate: int | None = None

    def __post_init__(self) -> None:
        if self.aggregate is not None and self.aggregate < 1:
            raise ConfigurationError(
                f"sync with aggregate {self.aggregate}: a round needs at least one update"
            )

    def rule(self) -> Rule:
        """Returns the rule: rounds, and no update from an older one."""
        return Rule(aggregate=self.aggregate or 0, staleness=0)

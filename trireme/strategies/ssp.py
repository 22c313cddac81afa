"""Stale synchronous parallel training: asynchronous, with a bound on staleness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["SSP"]


@dataclass(frozen=True)
class SSP(Strategy):
    """As `Async`, but a worker waits while it is more than `staleness` pushes ahead of the slowest.

    Source: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server (NIPS 2013), section 2.

    Attributes:
        staleness: the number of pushes that a worker may be ahead, at least 1.
        prefetch, uncommitted: see `Async`.
    """

    name: ClassVar[str] = "ssp"
    staleness: int = 3
    prefetch: bool = False
    uncommitted: bool = False

    def __post_init__(self) -> None:
        if self.staleness < 1:
            raise ConfigurationError(
                f"ssp with staleness {self.staleness}: give 1 or more, or use sync, in which "
                "no worker is ahead"
            )

    def rule(self) -> Rule:
        """Returns the rule: each update is a step; workers too far ahead wait for their answers."""
        return Rule(aggregate=1, staleness=self.staleness, uncommitted=self.uncommitted)

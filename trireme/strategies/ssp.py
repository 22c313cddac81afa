"""Stale synchronous parallel: asynchronous, but nobody runs too far ahead."""

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
        staleness: how many pushes a worker may be ahead, at least 1.
        prefetch: see `Async`.
    """

    name: ClassVar[str] = "ssp"
    staleness: int = 3
    prefetch: bool = False

    def rule(self) -> Rule:
        """Returns the rule: each update by itself, answers withheld from those too far ahead.

        Raises:
            ConfigurationError: the staleness is below 1.
        """
        if self.staleness < 1:
            raise ConfigurationError(
                f"ssp with staleness {self.staleness}: give 1 or more, or use sync, in which "
                "nobody is ahead of anybody"
            )
        return Rule(aggregate=1, staleness=self.staleness)

    def check(self, *, workers: int, servers: int) -> None:
        """Any cluster will do."""

"""Asynchronous replicas: every update is applied when it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["Async"]


@dataclass(frozen=True)
class Async(Strategy):
    """Each worker pushes its gradient and gets the newest values back, waiting for nobody.

    A gradient may have been computed from values that others have changed since. With one worker
    it equals plain training. Source: Dean et al., Large Scale Distributed Deep Networks (NIPS
    2012), section 4.1, "Downpour SGD" with one step between pushes.

    Attributes:
        prefetch: compute the next gradient while a push is under way, from the values that the
            push before brought: nobody waits for a server, and each gradient is older by one more
            of the worker's own updates.
    """

    name: ClassVar[str] = "async"
    prefetch: bool = False

    def rule(self) -> Rule:
        """Returns the rule: each update by itself, answered at once."""
        return Rule(aggregate=1, staleness=None)

    def check(self, *, workers: int, servers: int) -> None:
        """Any cluster will do."""

"""Asynchronous training: each update is applied when it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["Async"]


@dataclass(frozen=True)
class Async(Strategy):
    """Each worker pushes its gradient and receives the newest values, without waiting for others.

    A gradient may be computed from values that other workers have changed since. With one worker
    it equals plain training. Source: Dean et al., Large Scale Distributed Deep Networks (NIPS
    2012), section 4.1, "Downpour SGD" with one step between pushes.

    Attributes:
        prefetch: whether a worker computes the next gradient while a push is under way, from the
            values of the previous push. Workers then do not wait for servers, and the staleness of
            each gradient grows by one of the worker's own updates.
        uncommitted: whether each of several servers applies an update when it arrives, without
            waiting until all servers have it. It saves a message each way between servers. The
            update of a worker that is lost during a push may then stay on some servers only;
            server 0 counts such updates.
    """

    name: ClassVar[str] = "async"
    prefetch: bool = False
    uncommitted: bool = False

    def rule(self) -> Rule:
        """Returns the rule: each update is a step, answered at once."""
        return Rule(aggregate=1, staleness=None, uncommitted=self.uncommitted)

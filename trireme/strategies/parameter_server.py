"""Strategies with parameter servers, to which each worker pushes its gradients or deltas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule
from trireme.strategies.base import Strategy

__all__ = ["SSP", "Async", "Averaging", "DiLoCo", "Sync"]


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

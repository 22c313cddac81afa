"""The base class of strategies: frozen values that define how updates become steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trireme.errors import ConfigurationError
from trireme.ps.rule import Rule

__all__ = ["Strategy"]


@dataclass(frozen=True)
class Strategy(ABC):
    """A strategy of distributed training: a frozen dataclass of its options.

    An option that the launch also has has the same name there. A strategy checks its options when
    it is created, and raises `ConfigurationError`.

    Attributes:
        name: the strategy's name for `--strategy`.
    """

    name: ClassVar[str]

    @abstractmethod
    def rule(self) -> Rule:
        """Returns the parameter server's rule for this strategy."""

    def check(self, *, workers: int, servers: int) -> None:
        """Checks that the strategy can run on a cluster.

        Raises:
            ConfigurationError: it cannot run; says why, and what is possible.
        """
        if not servers and workers > 1:
            raise ConfigurationError(
                f"strategy {self.name} with {workers} workers needs a parameter server: add --ps "
                "1, or use --strategy allreduce"
            )
        aggregate = self.rule().aggregate
        if aggregate > workers:
            raise ConfigurationError(
                f"{self.name} with aggregate {aggregate} and {workers} workers: a round could "
                f"never fill; give at most --aggregate {workers}"
            )

    def outer(self, workers: int) -> Mapping[str, float | bool] | None:
        """Returns the servers' optimizer where workers push deltas, as arguments of SGD.

        None where workers push gradients, and servers run the user's optimizer.

        Args:
            workers: the number of workers of the job.
        """
        return None

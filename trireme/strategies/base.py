"""What a strategy is: a frozen value that says by which rule updates become steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from trireme.ps.rule import Rule

__all__ = ["Strategy"]


class Strategy(ABC):
    """How training is spread. Each is a frozen dataclass of its options.

    Attributes:
        name: what `--strategy` calls it.
    """

    name: ClassVar[str]

    @abstractmethod
    def rule(self) -> Rule:
        """Returns the parameter server's rule for this strategy.

        Raises:
            ConfigurationError: an option is out of range.
        """

    @abstractmethod
    def check(self, *, workers: int, servers: int) -> None:
        """Checks that the strategy can run on a cluster.

        Raises:
            ConfigurationError: says why not, and what would be possible.
        """

    def outer(self, workers: int) -> Mapping[str, float | bool] | None:
        """Returns the servers' optimizer where workers push deltas, as arguments of SGD.

        None where workers push gradients: servers then run the user's own.

        Args:
            workers: how many the job has.
        """
        return None

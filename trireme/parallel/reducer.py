"""What makes one gradient of those of several replicas that step together, and of one alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["NoMean", "Reducer"]


class Reducer(Protocol):
    """Makes one gradient of those of all replicas."""

    def share(self, examples: float) -> Callable[[], float]:
        """Begins to learn how many examples the others have.

        Args:
            examples: how many this replica's batch has; 0 where it has none.

        Returns:
            A function that waits, and gives the factor for this replica's mean loss: 1 where all
            have equally many.
        """

    def begin(self) -> None:
        """The backward pass that comes now is the last one of this step."""

    def finish(self) -> None:
        """Waits until the gradients are the means over all replicas."""


class NoMean:
    """One replica: its gradient is the mean."""

    def share(self, examples: float) -> Callable[[], float]:
        return _one

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass


def _one() -> float:
    return 1.0

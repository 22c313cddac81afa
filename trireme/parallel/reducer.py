"""The interface of reducers, which average the gradients of replicas that step together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["NoMean", "Reducer"]


class Reducer(Protocol):
    """Averages the gradients of all replicas."""

    def scale_factor(self, examples: float) -> Callable[[], float]:
        """Starts to exchange the numbers of examples of all replicas.

        Args:
            examples: the number of examples in this replica's batch; 0 for none.

        Returns:
            A function that waits, and returns the factor for this replica's mean loss: 1 where all
            batches have the same size.
        """

    def begin(self) -> None:
        """Announces that the next backward pass is the last of this step."""

    def finish(self) -> None:
        """Waits until the gradients are the means over all replicas."""


class NoMean:
    """The reducer of a single replica, whose gradient is the mean."""

    def scale_factor(self, examples: float) -> Callable[[], float]:
        return _one

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass


def _one() -> float:
    return 1.0

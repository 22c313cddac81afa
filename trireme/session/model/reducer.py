"""The base of reducers, which average the gradients of replicas that step together."""

from __future__ import annotations

from collections.abc import Callable


class Reducer:
    """Averages the gradients of all replicas; this class that of one, which is the mean already."""

    def scale_factor(self, examples: float) -> Callable[[], float]:
        """Starts to exchange the numbers of examples of all replicas."""
        return lambda: 1.0

    def lay_out(self) -> None:
        """Called when the parameters are others than before; all lie elsewhere."""

    def begin(self) -> None:
        """Announces that the next backward pass is the last of this step."""

    def finish(self) -> None:
        """Waits until the gradients are the means over all replicas."""

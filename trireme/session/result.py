"""What one call of `session.step` gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trireme.ps.messages import Verdict
    from trireme.ps.results import PushResult

__all__ = ["Metric", "StepResult"]

Metric = Callable[..., "torch.Tensor | float"]
"""(outputs, targets) -> a number, the mean over the batch."""


class StepResult:
    """One update. What would make a device wait is worked out when it is read.

    Attributes:
        global_step: the job's, after this update.
        verdict: what became of the update; with prefetch, of the update before, and None for the
            first; of all steps since the last exchange where workers train by themselves, and None
            in between.
        staleness: how many updates were applied between the pull of the values that this update
            was computed from and its push; with prefetch, of the update before.
        steps: of how many of this worker's steps the verdict is; 0 where there is none yet, as
            between two exchanges of workers that train by themselves.
        seconds: how long the step took, without waiting for its data.
        examples: how many examples the batch had.
    """

    __slots__ = (
        "_loss",
        "_metrics",
        "_outputs",
        "_values",
        "examples",
        "global_step",
        "seconds",
        "staleness",
        "steps",
        "verdict",
    )

    def __init__(
        self,
        loss: torch.Tensor,
        outputs: list[tuple[object, object]],
        metrics: Mapping[str, Metric],
        examples: int,
    ) -> None:
        self._loss = loss
        self._outputs = outputs
        self._metrics = metrics
        self._values: dict[str, float] | None = None
        self.examples = examples
        self.global_step = 0
        self.verdict: Verdict | None = None
        self.staleness = 0
        self.steps = 0
        self.seconds = 0.0

    @property
    def loss(self) -> float:
        """The mean loss of the batch, before the update."""
        return float(self._loss)

    @property
    def metrics(self) -> dict[str, float]:
        """Each metric's mean over the batch, before the update; empty where outputs are elsewhere.

        Of a pipeline only the last stage has outputs.
        """
        if not self._outputs and self._values is None:
            return {}
        if self._values is None:
            self._values = {
                name: _mean_over_pieces(metric, self._outputs)
                for name, metric in self._metrics.items()
            }
            self._outputs = []
        return self._values

    def decide(self, pushed: PushResult) -> None:
        """Takes what became of a push."""
        self.verdict, self.staleness, self.steps = pushed.decided, pushed.staleness, pushed.steps

    def __repr__(self) -> str:
        return (
            f"StepResult(global_step={self.global_step}, loss={self.loss:.6g}, "
            f"verdict={self.verdict}, staleness={self.staleness})"
        )


def _mean_over_pieces(metric: Metric, pieces: list[tuple[object, object]]) -> float:
    """Weighs the pieces of an accumulated batch by their examples."""
    import torch

    total = weight = 0.0
    for outputs, targets in pieces:
        size = targets.shape[0] if isinstance(targets, torch.Tensor) and targets.dim() else 1
        total += float(metric(outputs, targets)) * size
        weight += size
    return total / max(weight, 1.0)

"""The result of one call of `session.step`, and the metrics in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trireme.ps.messages import Verdict
from trireme.ps.results import PushResult
from trireme.session.metric_value import Metric, value_of


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the fraction of examples whose largest output is at the target.

    Args:
        outputs: scores of shape (examples, classes), or (examples,) for two classes, where a score
            above 0 means the second class.
        targets: class indices of shape (examples,), or one-hot rows of shape (examples, classes).

    Returns:
        A 0-dim float tensor in [0, 1].
    """
    chosen = outputs.argmax(dim=1) if outputs.dim() > 1 else (outputs > 0).long()
    if targets.dim() > 1:
        targets = targets.argmax(dim=1)
    return (chosen == targets).float().mean()


@dataclass(slots=True, eq=False, repr=False)
class StepResult:
    """The result of one update. Values that would make a device wait are computed when read.

    Attributes:
        global_step: the job's global step after this update.
        verdict: `trireme.Applied` or `trireme.Stale`: whether the update is in the parameters. With
            prefetch, the verdict of the previous update, and None for the first. Where workers
            train locally, the verdict of all steps since the last exchange, and None between
            exchanges. A worker that was taken for lost while an update was under way never hears
            of it: that one counts as stale, and may be in the parameters, once.
        staleness: the number of global steps between the pull of the values that the update was
            computed from, and its push; with prefetch, of the previous update.
        steps: the number of this worker's steps that the verdict is of; 0 where there is no
            verdict.
        seconds: the duration of the step, without waiting for its data.
        examples: the number of examples in the batch.
        weight: the number that the loss is the mean of: of the examples, or by `weight=`.
    """

    _loss: torch.Tensor | float | None
    _outputs: list[tuple[object, object]]
    _metrics: Mapping[str, Metric]
    examples: int
    global_step: int = 0
    verdict: Verdict | None = None
    staleness: int = 0
    steps: int = 0
    seconds: float = 0.0
    weight: float = 0.0
    _values: dict[str, float] | None = None

    @property
    def loss(self) -> float:
        """The mean loss of the batch, before the update; NaN where a loop has not logged it."""
        return math.nan if self._loss is None else float(self._loss)

    @property
    def has_loss(self) -> bool:
        """Whether the loss is known."""
        return self._loss is not None

    @property
    def metrics(self) -> dict[str, float]:
        """Each metric's mean over the batch, before the update.

        It is empty in processes without outputs: in a pipeline, all but those of the last stage.
        """
        if not self._outputs and self._values is None:
            return {}
        if self._values is None:
            self._values = {
                name: value_of(name, metric, self._outputs)
                for name, metric in self._metrics.items()
            }
            self._outputs = []
        return self._values

    def decide(self, pushed: PushResult) -> None:
        """Takes the verdict of a push."""
        self.verdict, self.staleness, self.steps = pushed.decided, pushed.staleness, pushed.steps

    def __repr__(self) -> str:
        return (
            f"StepResult(global_step={self.global_step}, loss={self.loss:.6g}, "
            f"verdict={self.verdict}, staleness={self.staleness})"
        )

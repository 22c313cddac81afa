"""What installed packages add to watch a worker's training: curves and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trireme.plugins import Plugins

if TYPE_CHECKING:
    import torch

    from trireme.data.batch import Batch
    from trireme.ps.messages import Span
    from trireme.session.model.computation import Computation
    from trireme.session.result import StepResult


class Observer:
    """Watches one worker's training. Each method does nothing unless a subclass overrides it."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def on_start(self) -> None:
        """Called when the worker has the job's values, before its first step."""

    def on_batch(self, batch: Batch) -> None:
        """Called before the program is handed a batch that the job deals."""

    def before_gradient(self, computation: Computation, batch: Any) -> None:
        """Called before a session computes the gradient of a batch."""

    def is_sound(self) -> bool:
        """Returns whether a gradient is to be used; else it is computed once more.

        Called after a session has computed it, or has failed to.
        """
        return True

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        """Called before an update, with its gradients.

        Args:
            weight: the number of examples that the gradient is the mean of; 0 for none.
            examples: their positions, where the job deals the data.
        """

    def after_update(self) -> None:
        """Called after an update, with the new values."""

    def after_step(self, recorder: Any, result: StepResult, *, due: bool) -> None:
        """Called when a step is counted; it is `due` every `log_every` steps."""

    def log(self, values: Mapping[str, float | torch.Tensor], run: str, step: int) -> None:
        """Called with numbers that the program or an evaluation logs, on the chief."""

    def status(self) -> Mapping[str, float | str]:
        """Returns what the worker tells of it; numbers are metrics too."""
        return {}

    def on_fail(self, error: BaseException) -> None:
        """Called with the exception that ends training."""

    def finish(self) -> None:
        """Called on the chief when training has ended, unless it failed."""

    def close(self) -> None:
        """Called when the job is left."""


@dataclass(frozen=True, slots=True)
class ObserverType:
    """A kind of observer. Its module should import fast.

    Attributes:
        open: the class, derived from `Observer`, as `package.module:class`.
    """

    open: str


OBSERVERS = Plugins("trireme.observers", "observer", ObserverType)  # every installed one


def observers_of(worker: Any) -> dict[str, Any]:
    """Returns the observers of a worker, by the names of their entry points."""
    return {name: OBSERVERS.imported(name, "open")(worker) for name in OBSERVERS}

"""Code of the user's own at the points of a session's life.

    class Printer(trireme.session.hooks.Hook):
        def after_step(self, session, result):
            if result.global_step % 100 == 0:
                print(session.optimizer.param_groups[0]["lr"])

    trireme.Session(..., hooks=[Printer(), EarlyStopping("loss", patience=3)])

Hooks are called on every worker, in the order in which they were given. An exception from a hook is
an exception of the script: it leaves the call that caused it (`step`, `evaluate`, the `with`
block), the hooks after it are not called, and the job fails with that traceback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trireme.errors import ConfigurationError

if TYPE_CHECKING:
    from trireme.session.result import StepResult
    from trireme.session.session import Session

__all__ = ["EarlyStopping", "Hook"]


class Hook:
    """What a session calls. Each method does nothing unless a subclass gives it something to do."""

    def on_start(self, session: Session) -> None:
        """The session has joined its job and has its first values; nothing is trained yet."""

    def before_step(self, session: Session, batch: Any) -> None:
        """The batch is about to be trained on."""

    def after_step(self, session: Session, result: StepResult) -> None:
        """An update was made. Reading the result's loss or metrics may wait for a device."""

    def on_checkpoint(self, session: Session, path: Path) -> None:
        """A checkpoint is on the disk; on the chief only, at one of the steps after its own."""

    def on_evaluate(self, session: Session, name: str, metrics: Mapping[str, float]) -> None:
        """A data set was evaluated; `metrics` has `loss` too. `name` is what it was called."""

    def on_stop(self, session: Session, reason: str) -> None:
        """Training has ended and is saved: `finished`, or what interrupted it; not if it failed."""


class EarlyStopping(Hook):
    """Ends the job when evaluations no longer get better. The chief's evaluations decide.

    A resumed run, or another chief, begins to count anew.

    Args:
        metric: which one, such as `loss` or `accuracy`.
        patience: after so many evaluations in a row without a new best, training ends.
        mode: whether lower (`min`) or higher (`max`) is better.
        min_delta: a new best is better by more than this.
        name: of the evaluations that count, as given to `Session.evaluate`.

    Raises:
        ConfigurationError: a value is out of range; or, at an evaluation, it has no such metric.
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        mode: Literal["min", "max"] = "min",
        *,
        min_delta: float = 0.0,
        name: str = "validation",
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigurationError(f"EarlyStopping(mode={mode!r}): it is 'min' or 'max'")
        if patience < 1:
            raise ConfigurationError(f"EarlyStopping(patience={patience}): it must be 1 or more")
        if not min_delta >= 0:
            raise ConfigurationError(f"EarlyStopping(min_delta={min_delta}): it must be 0 or more")
        self.best: float | None = None
        self._metric = metric
        self._patience = patience
        self._sign = 1 if mode == "max" else -1
        self._min_delta = min_delta
        self._name = name
        self._without = 0

    def on_evaluate(self, session: Session, name: str, metrics: Mapping[str, float]) -> None:
        if name != self._name or not session.is_chief:
            return
        if self._metric not in metrics:
            raise ConfigurationError(
                f"EarlyStopping watches {self._metric!r}, which the evaluation of {name} does not "
                f"have; it has {', '.join(sorted(metrics))}"
            )
        if self._is_better(metrics[self._metric]):
            self.best = metrics[self._metric]
            self._without = 0
            return
        self._without += 1
        if self._without == self._patience:
            session.stop(
                f"{self._metric} of {name} has not got better than {self.best} in "
                f"{self._patience} evaluations"
            )

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        return self.best is None or self._sign * (value - self.best) > self._min_delta

"""Hooks: a program's own code that a session calls at certain points.

    class Printer(trireme.session.hooks.Hook):
        def after_step(self, session, result):
            if result.global_step % 100 == 0:
                print(session.optimizer.param_groups[0]["lr"])

    trireme.Session(..., hooks=[Printer(), EarlyStopping("loss", patience=3)])

Hooks are called on every worker, in the order in which they were given. An exception from a hook is
an exception of the script: it propagates from the call that caused it (`step`, `evaluate`, the
`with` block), later hooks are not called, and the job fails with that traceback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trireme.errors import ConfigurationError
from trireme.location import RemotePath
from trireme.session.result import StepResult


class Hook:
    """Base class of hooks. Each method does nothing unless a subclass overrides it.

    Each is given the `trireme.Session` that calls it.
    """

    def on_start(self, session: Any) -> None:
        """Called when the session has joined its job and has its initial values."""

    def before_step(self, session: Any, batch: Any) -> None:
        """Called before a step trains on the batch."""

    def after_step(self, session: Any, result: StepResult) -> None:
        """Called after an update. Reading the result's loss or metrics may wait for a device."""

    def on_checkpoint(self, session: Any, path: Path | RemotePath) -> None:
        """Called on the chief, at a later step, when a checkpoint is on the disk.

        `path` is a `RemotePath`, whose text is a URL, where the run directory is in an object
        store.
        """

    def on_evaluate(self, session: Any, name: str, metrics: Mapping[str, float]) -> None:
        """Called after `Session.evaluate` with its `name`; `metrics` includes `loss`.

        `session.evaluated_step` is the global step of the values that were evaluated.
        """

    def on_stop(self, session: Any, reason: str) -> None:
        """Called when training has ended and is saved, unless the job failed.

        Args:
            session: the session.
            reason: `finished`, or what interrupted the job.
        """

    def on_fail(self, session: Any, error: BaseException) -> None:
        """Called when an exception in this process ends training; `on_stop` may not have been.

        An exception that it raises is added to the error as a note.

        Args:
            session: the session.
            error: the exception; `KeyboardInterrupt` or `SystemExit` where the script was ended.
        """


class EarlyStopping(Hook):
    """Ends the job when evaluations stop improving. The evaluations of the chief decide.

    A resumed run, or another chief, starts to count from zero.

    Args:
        metric: the metric, such as `loss` or `accuracy`.
        patience: training ends after this many evaluations in a row without a new best value.
        mode: whether lower (`min`) or higher (`max`) values are better.
        min_delta: a new best value must be better by more than this.
        name: the name of the evaluations that count, as given to `Session.evaluate`.

    Raises:
        ConfigurationError: a value is out of range; or, at an evaluation, there is no such metric.
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

    def on_evaluate(self, session: Any, name: str, metrics: Mapping[str, float]) -> None:
        if name != self._name or not session.is_chief:
            return
        if self._metric not in metrics:
            raise ConfigurationError(
                f"EarlyStopping watches {self._metric!r}, which the evaluation of {name} does not "
                f"have; it has {', '.join(sorted(metrics))}"
            )
        value = metrics[self._metric]
        better = self.best is None or self._sign * (value - self.best) > self._min_delta
        if better and not math.isnan(value):
            self.best = value
            self._without = 0
            return
        self._without += 1
        if self._without == self._patience:
            session.stop(
                f"{self._metric} of {name} has not got better than {self.best} in "
                f"{self._patience} evaluations"
            )

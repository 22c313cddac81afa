"""The hook that ends a job when its evaluations stop improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from trireme.errors import ConfigurationError
from trireme.session.hooks import Hook


class EarlyStopping(Hook):
    """Ends the job when evaluations stop improving. The evaluations of the chief decide.

    A resumed run, or another chief, starts to count from zero.

    Args:
        metric: the metric, such as `loss` or `accuracy`.
        patience: training ends after this many evaluations in a row without a new best value.
        mode: whether lower (`min`) or higher (`max`) values are better.
        min_delta: a new best value must be better by more than this.
        name: the name of the evaluations that count, as given to `Session.evaluate`.
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
